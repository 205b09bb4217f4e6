"""Iterable datasets in a loader's workers go on where a state was asked for, whatever workers had read ahead."""

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_parstrat.strategies.data.samplers import PositionedSampler
from lightning_parstrat.strategies.data.streams import drawn_from, follow_workers, handed_out, leave_workers


class Numbers(IterableDataset[int]):
    """Its own iterator; each worker has numbers of its own, and stands at its begin again when it has ended."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.position = sizes, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        info: Any = get_worker_info()
        assert info.dataset is self
        if self.position == self.sizes[info.id]:
            self.position = 0
            raise StopIteration
        self.position += 1
        return 100 * info.id + self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def followed(
    sizes: tuple[int, ...], position: Any = None, **arguments: Any
) -> tuple[DataLoader[int], PositionedSampler]:
    dataloader = DataLoader(Numbers(*sizes), num_workers=len(sizes), multiprocessing_context="fork", **arguments)
    sampler = PositionedSampler(dataloader, lambda: 100)
    follow_workers(dataloader, sampler.take_stream_begin)
    if position is not None:
        sampler.go_on_in_stream(position)
    return dataloader, sampler


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ((7, 2, 4), {"batch_size": 2}),
        ((3, 6), {"batch_size": 2, "drop_last": True, "persistent_workers": True}),
        ((1, 3), {"batch_size": None, "prefetch_factor": 4}),
    ],
)
def test_workers_go_on_with_what_was_not_handed_out(sizes: tuple[int, ...], arguments: dict[str, Any]) -> None:
    dataloader, _ = followed(sizes, **arguments)
    batches = iter(dataloader)
    whole = [str(batch) for batch in batches]
    assert handed_out(batches) == len(whole) > 3
    for taken in range(len(whole) + 1):
        resumed, _ = followed(sizes, drawn_from(batches).state(taken), **arguments)
        assert [str(batch) for batch in resumed] == whole[taken:]
        if arguments.get("persistent_workers"):
            assert [str(batch) for batch in resumed] == whole


def test_a_loader_has_its_own_class_and_functions_again() -> None:
    dataloader, sampler = followed((3,), batch_size=None)
    before = dataloader.collate_fn
    assert len(list(dataloader)) == 3 and dataloader.collate_fn is before and dataloader.worker_init_fn is None
    leave_workers(dataloader)
    sampler.remove(dataloader)
    assert type(dataloader) is DataLoader and [int(one) for one in dataloader] == [1, 2, 3]


def test_another_number_of_workers_is_refused() -> None:
    dataloader, _ = followed((4, 4), batch_size=2)
    batches = iter(dataloader)
    next(batches)
    state = drawn_from(batches).state(1)
    with pytest.raises(
        MisconfigurationException, match=r"in 2 workers; the data loader has num_workers=3.*num_workers=2"
    ):
        followed((4, 4, 4), state, batch_size=2)
