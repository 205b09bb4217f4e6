"""Ranks with different numbers of training batches end each epoch together, instead of waiting for each other forever.

Gradients of a step are averaged over all ranks, so the epoch ends for all when the first rank has no batch left; the
other ranks do not train on what they have left. Where all ranks know their lengths and agree, as with Lightning's
distributed sampler for any map-style dataset, loaders are not changed and no more is sent.
"""

from collections.abc import Iterator
from functools import partial
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

_NO_BATCH = object()


class EvenDataLoader:
    """Base of data loaders' classes that do not yield all of their batches on every rank.

    An object's class can only be swapped for one of the same memory layout. So the loader's own class comes first among
    the bases, this one and its kinds have empty ``__slots__``, and their methods are copied, see :func:`_swap`.
    """

    __slots__ = ()
    _uneven_class: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies, such as are sent to worker processes, have the loader's own class."""
        even_class = type(self)
        restore(self)
        try:
            make, *rest = self.__reduce_ex__(protocol)
            # Of `copyreg.__newobj__`, pickle checks that the class is the object's, which it is not here; a partial is
            # not checked.
            return partial(make), *rest
        finally:
            _set_class(self, even_class)

    def _all_batches(self) -> Iterator[Any]:
        return iter(type(self)._uneven_class.__iter__(self))


class _StandIn:
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
        _set_class(dataloader, type(dataloader)._uneven_class)


class _EndsEarly(EvenDataLoader):
    """Ends after the number of batches that every rank has."""

    __slots__ = ()
    _even_agreement: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self._all_batches(), self._even_agreement)

    def __len__(self) -> int:
        return self._even_agreement


class _VotesOnEveryBatch(EvenDataLoader):
    """Ends when the first rank has no batch left."""

    __slots__ = ()
    _even_agreement: Collectives

    def __iter__(self) -> Iterator[Any]:
        return _while_all_have_one(self._all_batches(), self._even_agreement)

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
    cls = type(dataloader)
    namespace = {
        "_even_agreement": agreement,
        "_uneven_class": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        **{name: getattr(kind, name) for name in ("__iter__", "__len__", "__reduce_ex__")},
    }
    # Rows of a tensor, and all that is computed from them, would inherit the swapped class.
    if not hasattr(cls, "__iter__") or isinstance(dataloader, torch.Tensor):
        return _swap(_StandIn(dataloader), kind, agreement)
    try:
        _set_class(dataloader, type(cls.__name__, (cls, kind), namespace))
    except TypeError:
        return _swap(_StandIn(dataloader), kind, agreement)
    return dataloader


def _set_class(dataloader: object, cls: type) -> None:
    """Bypasses the loader's own ``__setattr__``, with which a frozen dataclass would refuse."""
    object.__setattr__(dataloader, "__class__", cls)
