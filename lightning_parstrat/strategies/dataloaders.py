"""Ranks with different numbers of training batches end each epoch together, instead of waiting for each other forever.

Gradients of a step are averaged over all ranks, so the epoch ends for all when the first rank has no batch left; what
the others have left is not trained on in this epoch. Where all ranks know their lengths and agree, which is what
Lightning's distributed sampler makes of any map-style dataset, nothing changes and nothing is sent.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.distributed.collectives import Collectives

_NO_BATCH = object()


class EvenDataLoader:
    """Mixed into the class of a data loader that must not yield all of its batches on every rank."""

    _original: type

    def _own_batches(self) -> Iterator[Any]:
        return iter(super().__iter__())  # type: ignore[misc]


class _StandIn:
    """For an iterable whose class is fixed, such as a list or a generator."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def make_even(dataloader: Any, control: Collectives, allow_empty: bool) -> Any:
    """Makes all ranks draw equally many training batches from their loaders. Collective.

    Two numbers are compared at once; where a rank's loader does not know its length, two more before every batch.

    Args:
        dataloader: This rank's loader; its class is swapped where batches have to be left out, see :func:`restore`.
        control: Compares the lengths.
        allow_empty: Whether no rank trains, rather than that an error is raised, where one has no batch at all.

    Returns:
        The loader, or something that stands for it.

    Raises:
        MisconfigurationException: Some ranks have batches and some have none.
    """
    restore(dataloader)
    length = sized_len(dataloader)
    most, least = _extremes(-1 if length is None else length, control)
    if least == -1:
        return _swap(dataloader, _VotesOnEveryBatch, control)
    if least == most:
        return dataloader
    if least == 0 and not allow_empty:
        raise MisconfigurationException(
            f"A rank has no training batch, while another one has {most}. Give every rank at least one: look at the"
            " sampler, at how the files are shared out, and at `drop_last`."
        )
    rank_zero_warn(
        f"The ranks have between {least} and {most} training batches. Each epoch ends on all ranks after {least}, and"
        " the batches that some have left are not used in it."
    )
    return _swap(dataloader, _EndsEarly, least)


def restore(dataloader: Any) -> None:
    """Gives a loader its own class back; it may be used by others."""
    if isinstance(dataloader, EvenDataLoader):
        dataloader.__class__ = dataloader._original


class _EndsEarly(EvenDataLoader):
    """Ends after the number of batches that every rank has."""

    _agreement: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self._own_batches(), self._agreement)

    def __len__(self) -> int:
        return self._agreement


class _VotesOnEveryBatch(EvenDataLoader):
    """Ends when the first rank has no batch left."""

    _agreement: Collectives

    def __iter__(self) -> Iterator[Any]:
        batches = self._own_batches()
        for number in range(2**62):
            batch = next(batches, _NO_BATCH)
            somebody_has, nobody_lacks = _extremes(int(batch is not _NO_BATCH), self._agreement)
            if not nobody_lacks:
                if somebody_has:
                    rank_zero_warn(
                        f"After {number} training batches a rank had none left while others had; the epoch ends there"
                        " on all ranks."
                    )
                return
            yield batch

    def __len__(self) -> int:
        raise TypeError("the data loader of some rank does not know its length")


def _extremes(number: int, control: Collectives) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers."""
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    most, least = extremes.tolist()
    return most, -least


def _swap(dataloader: Any, kind: type[EvenDataLoader], agreement: Any) -> Any:
    cls = type(dataloader)
    namespace = {
        "_agreement": agreement,
        "_original": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    if not hasattr(cls, "__iter__"):
        return _swap(_StandIn(dataloader), kind, agreement)
    try:
        dataloader.__class__ = type(cls.__name__, (kind, cls), namespace)
    except TypeError:
        return _swap(_StandIn(dataloader), kind, agreement)
    return dataloader
