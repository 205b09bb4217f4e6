"""Which elements of a parameter each rank keeps the state of, and which of them it writes to a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.shard_groups import ShardPlace, piece_bounds
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
    own = layout.slice_of(slot.place, shard).elements
    start, numel = layout.bounds[shard] - slot.place.offset, layout.shard_numel(shard)
    first, last = (start + numel * number // copies for number in (copy, copy + 1))
    written = slice(max(first, own.start), min(last, own.stop))
    return Cut(tuple(slot.parameter.shape), slot.strides, own, written, slot.shard)


def cuts_in_rows(parameters: Iterable[Tensor], place: ShardPlace) -> dict[Tensor, Cut]:
    """How parameters that FSDP2 has sharded are cut along their first dimension. Others are left out.

    The parts are equal, except for the last ones, which may be shorter or empty. As elements lie row by row, each part
    is one run of them. Parts of tensor-parallel layers are several runs, and are left out, too. Not collective.

    Args:
        parameters: Parameters of a module.
        place: The part that this rank holds.
    """
    sharded = (one for one in parameters if isinstance(one, DTensor) and one.device_mesh.ndim == 1)
    return {one: _cut_in_rows(one, place) for one in sharded}


def _cut_in_rows(parameter: DTensor, place: ShardPlace) -> Cut:
    own = own_rows(parameter, parameter)
    bounds = piece_bounds(own.stop - own.start, place.copies)
    first, last = (own.start + bounds[number] for number in (place.copy, place.copy + 1))
    return Cut(tuple(parameter.shape), parameter.stride(), own, slice(first, last), parameter)


def own_rows(parameter: DTensor, gathered: Tensor) -> slice:
    """The elements of a parameter that this rank holds, if FSDP2 has sharded it. Not collective.

    Args:
        parameter: The parameter.
        gathered: What FSDP2 gathers: all of it, or the rank's part of a tensor-parallel layer.
    """
    # As torch cuts. Beyond the last row there are no elements.
    rows, numel = gathered.shape[0], gathered.numel()
    length = -(-rows // parameter.device_mesh.size(0)) * (numel // rows)
    begin = min(parameter.device_mesh.get_local_rank(0) * length, numel)
    return slice(begin, begin + local(parameter).numel())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, over the same memory. A whole tensor is returned unchanged. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. A whole tensor is returned unchanged. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
