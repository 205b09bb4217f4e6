"""Which elements of a parameter each rank keeps the state of, and which of them it writes to a checkpoint."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.distributed.engine.buckets import ParameterSlot


class Cut(NamedTuple):
    """How a parameter and its state are cut. Elements are counted in storage order.

    Attributes:
        shape: Shape of the whole parameter.
        strides: Strides with which the whole parameter's elements lie in storage order.
        own: The elements whose state this rank keeps, maybe none.
        written: Those that this rank writes. If other ranks keep the same elements, all of them write equal parts.
        key: The key of this rank's state in ``optimizer.state``. If it keeps none, None.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    own: slice
    written: slice
    key: Tensor | None


class Run(NamedTuple):
    """Elements of a tensor in storage order, from ``start`` on: 1-D. One that is loaded holds this rank's part."""

    start: int
    elements: Tensor


def cuts_in_buckets(slots: Mapping[Tensor, ParameterSlot]) -> dict[Tensor, Cut]:
    """How parameters in buckets are cut. Every rank has all of each parameter, and the state of its shard."""
    return {parameter: cut_in_bucket(slot, slot.bucket.place) for parameter, slot in slots.items()}


def cut_in_bucket(slot: ParameterSlot, place: ShardPlace) -> Cut:
    """How a parameter is cut for the rank with that part of the state."""
    layout, (shard, copy, copies) = slot.bucket.layout, place
    part = layout.slice_of(slot.place, shard)
    own = slice(0, 0) if part is None else part.elements
    start, numel = layout.bounds[shard] - slot.place.offset, layout.shard_numel(shard)
    first, last = (start + numel * number // copies for number in (copy, copy + 1))
    written = slice(max(first, own.start), min(last, own.stop))
    return Cut(tuple(slot.parameter.shape), slot.strides, own, written, slot.shard)
