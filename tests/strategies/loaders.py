"""Training data of every kind that a Trainer takes, of any number of batches."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.strategies import zoo

BATCH_SIZE = 4
TIMEOUT = 40.0
TOLERANCE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}

Lengths = tuple[tuple[int, ...], ...]
FIRST: dict[int, Lengths] = {2: ((5,), (3,)), 3: ((4,), (3,), (6,))}
PAIRS: dict[int, Lengths] = {2: ((5, 2), (3, 4)), 3: ((4, 3), (3, 2), (6, 5))}


def smallest(lengths: Lengths) -> tuple[int, ...]:
    return tuple(map(min, zip(*lengths, strict=True)))


EVERYTHING = {"max_epochs": 3, "accumulate_grad_batches": 2, "validate": True}


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"max_epochs": 3, "validate": True},
    EVERYTHING,
    {"max_epochs": 2, "limit_train_batches": 2},
    {"max_epochs": 2, "limit_train_batches": 4, "accumulate_grad_batches": 2, "validate": True},
    {"max_epochs": 2, "val_check_interval": 2, "validate": True},
    {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3, "validate": True},
    {"max_steps": 4, "max_epochs": -1, "validate": True},
    {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
]


def batch_at(number: int) -> Tensor:
    """Different on every rank."""
    start = (number * dist.get_world_size() + dist.get_rank()) * BATCH_SIZE
    return zoo.Samples(480).data[start : start + BATCH_SIZE]


class Samples(Dataset):
    """This rank's own."""

    def __init__(self, batches: int) -> None:
        self.batches = [batch_at(number) for number in range(batches)]

    def __len__(self) -> int:
        return len(self.batches) * BATCH_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index // BATCH_SIZE][index % BATCH_SIZE]


class Stream(IterableDataset):
    """The same samples without a length; workers take turns, so that the order of the batches stays."""

    def __init__(self, batches: int) -> None:
        self.samples = Samples(batches)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for batch in self.samples.batches[first::step]:
            yield from batch


class ByIndex:
    """Iterable by the old protocol alone."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.batches:
            raise IndexError(index)
        return batch_at(index)


class Generates:
    """Makes a new generator each time, and has no length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return map(batch_at, range(self.batches))


@dataclass(frozen=True)
class Immutable:
    batches: int

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        return map(batch_at, range(self.batches))


class Slotted:
    __slots__ = ("batches",)

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        return map(batch_at, range(self.batches))


class Wrapper:
    """Has attributes with names that others might want to use, too."""

    def __init__(self, batches: int) -> None:
        self._original = self._dataloader = self._agreement = sized(batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._dataloader)

    def __len__(self) -> int:
        return len(self._dataloader)


class Resumable(DataLoader):
    """Its state is how many batches it has yielded in this epoch."""

    yielded = 0
    resume_at = 0

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        self.yielded, self.resume_at = self.resume_at, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.yielded:
                self.yielded += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume_at = state["yielded"]


def sized(batches: int) -> DataLoader:
    return DataLoader(Samples(batches), batch_size=BATCH_SIZE)


def unsized(batches: int) -> DataLoader:
    return DataLoader(Stream(batches), batch_size=BATCH_SIZE)


def with_workers(batches: int) -> DataLoader:
    # Not forked from the pool's processes, which have threads, but from one that has imported what they need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch"])
    return DataLoader(
        Stream(batches),
        batch_size=BATCH_SIZE,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )


def sometimes_shorter(batches: int, *other: int) -> Any:
    return {"one": sized(batches), "other": unsized(*other)}


def nested(batches: int, *other: int) -> Any:
    return {"one": [unsized(batches), list(range(*other))], "other": sized(*other)}


def min_size(batches: int, *other: int) -> CombinedLoader:
    return CombinedLoader([sized(batches), sized(*other)], "min_size")


def max_size_cycle(batches: int, *other: int) -> CombinedLoader:
    return CombinedLoader([sized(batches), sized(*other)], "max_size_cycle")


def max_size(batches: int, *other: int) -> CombinedLoader:
    return CombinedLoader({"one": sized(batches), "other": list(range(*other))}, "max_size")


def min_size_unsized(batches: int, *other: int) -> CombinedLoader:
    return CombinedLoader([unsized(batches), sized(*other)], "min_size")


def max_size_cycle_unsized(batches: int, *other: int) -> CombinedLoader:
    return CombinedLoader([unsized(batches), unsized(*other)], "max_size_cycle")


def integers(batches: int) -> list[int]:
    return list(range(batches))


def tensor(batches: int) -> Tensor:
    return torch.stack([batch_at(number) for number in range(batches)])


def generator(batches: int) -> Iterator[Tensor]:
    return (batch_at(number) for number in range(batches))
