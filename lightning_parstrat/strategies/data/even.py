"""Ranks with different numbers of training batches end each epoch together, instead of waiting for each other forever.

Gradients of a step are averaged over all ranks, so the epoch ends for all when the first rank has no batch left; the
other ranks do not train on what they have left. Where all ranks know their lengths and agree, as with Lightning's
distributed sampler for any map-style dataset, loaders are not changed and no more is sent.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import extremes_over_ranks
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.watch import watching
from lightning_parstrat.strategies.data.samplers import batches_before
from lightning_parstrat.strategies.data.swapped import SwappedLoader, set_class, swap_class

_NO_BATCH = object()


class EvenDataLoader(SwappedLoader):
    """Base of data loaders' classes that do not yield all of their batches on every rank."""

    __slots__ = ()

    def _all_batches(self) -> Iterator[Any]:
        return iter(type(self).class_before.__iter__(self))  # type: ignore[attr-defined]


class _SomeBatches(Iterator[Any]):
    """Yields some batches of a loader's iterator, which it shows."""

    def __init__(self, all_batches: Iterator[Any], batches: Iterator[Any]) -> None:
        self.all_batches = all_batches
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)


def loaders_iterator(iterator: Any) -> Any:
    """What the user's loader has returned, of an iterator of a loader that may have been made even."""
    return iterator.all_batches if isinstance(iterator, _SomeBatches) else iterator


class StandIn:
    """Stands for an iterable whose class cannot be swapped, such as a list, or is inherited by its batches."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataloader)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        # While it is being copied or unpickled it has none: asking itself for it would never end.
        if name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def all_batches(dataloader: Any) -> Iterator[Any]:
    """A pass over a loader as its user has made it, even if it has been made even for training."""
    return dataloader._all_batches() if isinstance(dataloader, EvenDataLoader) else iter(dataloader)


def make_even(dataloader: Any, control: Collectives, allow_empty: bool) -> Any:
    """Makes all ranks draw equally many training batches from their loaders. Collective.

    One all-reduce of 16 bytes; where some rank's loader does not know its length, one more before every batch.

    Args:
        dataloader: This rank's loader; its class is swapped where batches have to be left out, see :func:`restore`.
        control: Compares the lengths.
        allow_empty: Whether, if some rank has no batch at all, no rank trains; otherwise that is an error.

    Returns:
        The loader, or an object that stands for it.

    Raises:
        MisconfigurationException: Some ranks have batches and some have none.
    """
    # It may still be limited by an earlier fit, whose number of batches would be taken for its length.
    restore(dataloader)
    length = sized_len(dataloader)
    # -1 is less than any length, so that all ranks learn that one does not know its own.
    with watching("the comparison of all ranks' data loaders"):
        most, least = extremes_over_ranks(-1 if length is None else length, control)
    if least == -1:
        return _swap(dataloader, _VotesOnEveryBatch, control)
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
    return _swap(dataloader, _EndsEarly, least)


def restore(dataloader: Any) -> None:
    """Gives a loader its own class back: the user may use it elsewhere."""
    if isinstance(dataloader, EvenDataLoader):
        set_class(dataloader, type(dataloader).class_before)


class _EndsEarly(EvenDataLoader):
    """Ends after the number of batches that every rank has."""

    __slots__ = ()
    _even_agreement: int

    def __iter__(self) -> Iterator[Any]:
        batches = self._all_batches()
        return _SomeBatches(batches, islice(batches, max(0, self._even_agreement - batches_before(batches))))

    def __len__(self) -> int:
        return self._even_agreement


class _VotesOnEveryBatch(EvenDataLoader):
    """Ends when the first rank has no batch left."""

    __slots__ = ()
    _even_agreement: Collectives

    def __iter__(self) -> Iterator[Any]:
        batches = self._all_batches()
        return _SomeBatches(batches, _while_all_have_one(batches, self._even_agreement))

    def __len__(self) -> int:
        raise TypeError("the data loader of some rank does not know its length")


def _while_all_have_one(batches: Iterator[Any], control: Collectives) -> Iterator[Any]:
    for number in count():
        batch = next(batches, _NO_BATCH)
        with watching("the agreement on the next training batch"):
            somebody_has, nobody_lacks = extremes_over_ranks(int(batch is not _NO_BATCH), control)
        if not nobody_lacks:
            if somebody_has:
                rank_zero_warn(
                    f"After {counted(number, 'training batch', 'training batches')} a rank had none left while others"
                    " had; the epoch ends there on all ranks."
                )
            return
        yield batch


def _swap(dataloader: Any, kind: type[EvenDataLoader], agreement: Any) -> Any:
    """The loader with the iteration of ``kind``, to which ``agreement`` is known; or an object that stands for it."""
    # Rows of a tensor, and all that is computed from them, would inherit the swapped class.
    if not hasattr(type(dataloader), "__iter__") or isinstance(dataloader, torch.Tensor):
        return _swap(StandIn(dataloader), kind, agreement)
    methods = {name: getattr(kind, name) for name in ("__iter__", "__len__")}
    try:
        swap_class(dataloader, kind, {"_even_agreement": agreement, **methods})
    except TypeError:
        return _swap(StandIn(dataloader), kind, agreement)
    return dataloader
