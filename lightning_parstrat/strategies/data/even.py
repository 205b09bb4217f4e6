"""Ranks with different numbers of training batches end each epoch together, instead of waiting for each other forever.

Gradients of a step are averaged over all ranks. So the epoch ends for all when the first rank has no batch left. The
other ranks do not train on their remaining batches. If all ranks know their lengths and these agree, loaders are not
changed, and ranks send nothing more. That is so with Lightning's distributed sampler for any map-style dataset.
"""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import extremes_over_ranks
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import watching
from lightning_parstrat.strategies.data.samplers import batches_before
from lightning_parstrat.strategies.data.stand_in import StandIn

_NO_BATCH = object()


def make_even(dataloader: Any, control: Collectives, allow_empty: bool) -> Any:
    """Makes all ranks draw equally many training batches from their loaders. Collective.

    It takes one all-reduce of 16 bytes. If some rank's loader does not know its length, it takes one more before every
    batch.

    Args:
        dataloader: This rank's loader, which is not changed.
        control: Compares the lengths.
        allow_empty: Whether a rank may have no batch at all. Then no rank trains. Otherwise that is an error.

    Returns:
        The loader, or a stand-in for it.

    Raises:
        MisconfigurationException: Some ranks have batches and some have none.
    """
    length = sized_len(dataloader)
    # -1 is less than any length: it shows all ranks that a loader does not know its length.
    with watching("the comparison of all ranks' data loaders"):
        most, least = extremes_over_ranks(-1 if length is None else length, control)
    if least == -1:
        return Even(dataloader, lambda batches: while_all_have_one(batches, control, "training batch", _end))
    if least == most:
        return dataloader
    if least == 0 and not allow_empty:
        raise MisconfigurationException(
            f"A rank has no training batch, while another one has {most}. Give every rank at least one: check the"
            " sampler, how files are distributed over the ranks, and `drop_last`."
        )
    rank_zero_warn(
        f"The ranks have between {least} and {most} training batches. Each epoch ends on all ranks after {least}; the"
        " remaining batches of some ranks are not used in it."
    )
    return Even(dataloader, lambda batches: islice(batches, max(0, least - batches_before(batches))), least)


def users_own(dataloader: Any) -> Any:
    """The user's loader, for a loader that may be a stand-in."""
    return dataloader.stands_for if type(dataloader) is Even else dataloader


class _SomeBatches(StandIn):
    """Stands for a loader's iterator, and yields some of its batches."""

    __slots__ = ("_batches",)

    def __init__(self, iterator: Iterator[Any], batches: Iterator[Any]) -> None:
        super().__init__(iterator)
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class Even(StandIn):
    """Stands for a loader, and ends on all ranks together.

    Args:
        dataloader: The loader.
        some: Yields those of its batches that all ranks have.
        length: Their number. None if that is unknown.
    """

    __slots__ = ("_length", "_some")

    def __init__(
        self, dataloader: Any, some: Callable[[Iterator[Any]], Iterator[Any]], length: int | None = None
    ) -> None:
        super().__init__(dataloader)
        self._some, self._length = some, length

    @override
    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return _SomeBatches(batches, self._some(batches))

    @override
    def __len__(self) -> int:
        if self._length is None:
            # On every rank, also on those whose loaders know their lengths.
            raise TypeError("the data loader of some rank does not know its length")
        return self._length


def while_all_have_one(
    batches: Iterator[Any], control: Collectives, name: str, at_difference: Callable[[int], None]
) -> Iterator[Any]:
    """The batches until a rank has none left. Collective before each.

    Args:
        batches: This rank's.
        control: Compares whether ranks have one.
        name: What a batch is called in logs of ranks that wait.
        at_difference: Called with the number of earlier batches if another rank has one more.
    """
    for number in count():
        batch = next(batches, _NO_BATCH)
        with watching(f"the agreement on the next {name}"):
            some_have, all_have = extremes_over_ranks(int(batch is not _NO_BATCH), control)
        if not all_have:
            if some_have:
                at_difference(number)
            return
        yield batch


def _end(number: int) -> None:
    rank_zero_warn(
        f"After {counted(number, 'training batch', 'training batches')} a rank had none left while others had; the"
        " epoch ends there on all ranks."
    )
