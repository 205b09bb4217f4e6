"""Which rank owns which element of which parameter, in which bucket: one pure function, the same on every rank.

Buffers, collectives, optimizer and checkpoints all consume the plan that :func:`plan_buckets` returns; none of them
computes an offset of its own (the idea is Megatron-LM's distributed optimizer's). Offsets count elements.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Partition = Literal["element", "parameter"]


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the plan must know of one parameter.

    Args:
        name: Its qualified name, for messages and for the fingerprint.
        shape: Its shape.
        dtype: The name of its dtype; ranks must agree on it.
        itemsize: Bytes per element.
        group: Parameters share a bucket only where their groups are equal, such as (dtype, device, optimizer).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    group: Hashable

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, kw_only=True)
class LayoutPolicy:
    """How parameters are laid out in buckets.

    Args:
        world_size: Number of ranks that share the optimizer state.
        bucket_cap_bytes: A bucket is closed before it would grow beyond this; a larger parameter has its own bucket.
        partition: ``"element"`` cuts every bucket into equal shards wherever the cut falls; ``"parameter"`` lets no
            parameter cross a shard boundary, at the price of padding.
        alignment_bytes: Parameters and shards start at multiples of this; 64 is a cache line, and four times what
            vectorised GPU kernels ask for.

    Raises:
        ValueError: An argument is out of range.
    """

    world_size: int
    bucket_cap_bytes: int
    partition: Partition = "element"
    alignment_bytes: int = 64

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"Invalid world_size: {self.world_size}. Must be >= 1.")
        if self.bucket_cap_bytes < 1:
            raise ValueError(f"Invalid bucket_cap_bytes: {self.bucket_cap_bytes}. Must be >= 1.")
        if self.partition not in get_args(Partition):
            raise ValueError(f"Invalid partition: {self.partition!r}. Must be one of {get_args(Partition)}.")
        if self.alignment_bytes < 1:
            raise ValueError(f"Invalid alignment_bytes: {self.alignment_bytes}. Must be >= 1.")


class Slot(NamedTuple):
    """Where one parameter lies in its bucket: elements ``[offset, offset + numel)``."""

    parameter: int
    offset: int
    numel: int


class ShardSlice(NamedTuple):
    """The part of one parameter that one rank owns.

    Elements ``[parameter_start, parameter_start + numel)`` of the parameter, in storage order, lie at
    ``[shard_start, shard_start + numel)`` of the rank's shard.
    """

    parameter: int
    parameter_start: int
    shard_start: int
    numel: int


class BucketLayout(NamedTuple):
    """One bucket: ``numel`` elements (padding included), of which each rank owns ``numel // world_size`` in a row."""

    slots: tuple[Slot, ...]
    numel: int
    itemsize: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements in each rank's shard, padding included."""
        return self.numel // self.world_size

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def slice_of(self, slot: Slot, rank: int) -> ShardSlice | None:
        """The part of the slot's parameter that ``rank`` owns, or None."""
        start, stop = rank * self.shard_numel, (rank + 1) * self.shard_numel
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
        if first >= last:
            return None
        return ShardSlice(slot.parameter, first - slot.offset, first - start, last - first)

    def shard_slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """The slices that ``rank`` owns, in the order of the slots; parameters it owns nothing of are left out."""
        slices = (self.slice_of(slot, rank) for slot in self.slots)
        return tuple(piece for piece in slices if piece is not None)


def plan_buckets(parameters: Sequence[ParameterSpec], policy: LayoutPolicy) -> tuple[BucketLayout, ...]:
    """Assigns every parameter a slot in a bucket, and so every element an owner.

    Args:
        parameters: In the order in which their gradients are expected to become ready.
        policy: How to lay them out.

    Returns:
        The buckets, ordered by when their last gradient is expected, which is the order of their reductions. Linear
        in the number of parameters, independent of the world size (``"parameter"``: times its logarithm).
    """
    place = _place_by_element if policy.partition == "element" else _place_by_parameter
    buckets = [
        (members[-1], place([(index, parameters[index]) for index in members], policy))
        for members in _assign_to_buckets(parameters, policy.bucket_cap_bytes)
    ]
    return tuple(bucket for _, bucket in sorted(buckets, key=lambda item: item[0]))


def fingerprint(parameters: Sequence[ParameterSpec], buckets: Sequence[BucketLayout]) -> int:
    """A 62-bit number that differs (but for chance) between ranks whose parameters or plans differ."""
    names = [(spec.name, spec.shape, spec.dtype) for spec in parameters]
    digest = hashlib.sha256(repr((names, tuple(buckets))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def _assign_to_buckets(parameters: Sequence[ParameterSpec], cap_bytes: int) -> list[list[int]]:
    """Groups the indices of parameters, in their order, so that no bucket of several exceeds the cap."""
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    for index, spec in enumerate(parameters):
        size = spec.numel * spec.itemsize
        if spec.group in open_buckets and open_bytes[spec.group] + size > cap_bytes:
            closed.append(open_buckets.pop(spec.group))
        if spec.group not in open_buckets:
            open_buckets[spec.group], open_bytes[spec.group] = [], 0
        open_buckets[spec.group].append(index)
        open_bytes[spec.group] += size
    return closed + list(open_buckets.values())


def _place_by_element(members: list[tuple[int, ParameterSpec]], policy: LayoutPolicy) -> BucketLayout:
    """One parameter after the other; the shards' boundaries fall where they may."""
    itemsize = members[0][1].itemsize
    alignment = max(1, policy.alignment_bytes // itemsize)
    slots, end = [], 0
    for index, spec in members:
        offset = _round_up(end, alignment)
        slots.append(Slot(index, offset, spec.numel))
        end = offset + spec.numel
    numel = _round_up(max(end, 1), alignment * policy.world_size)
    return BucketLayout(tuple(slots), numel, itemsize, policy.world_size)


def _place_by_parameter(members: list[tuple[int, ParameterSpec]], policy: LayoutPolicy) -> BucketLayout:
    """Largest parameter first, each to the rank that holds least (longest-processing-time bin packing).

    R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the fullest shard is at most 4/3 of the optimum.
    """
    itemsize = members[0][1].itemsize
    alignment = max(1, policy.alignment_bytes // itemsize)
    loads = [0] * policy.world_size
    starts: dict[int, tuple[int, int]] = {}
    for index, spec in sorted(members, key=lambda member: -member[1].numel):
        rank = min(range(policy.world_size), key=loads.__getitem__)
        starts[index] = (rank, loads[rank])
        loads[rank] += _round_up(spec.numel, alignment)
    shard_numel = max(*loads, alignment)
    slots = []
    for index, spec in members:
        rank, start = starts[index]
        slots.append(Slot(index, rank * shard_numel + start, spec.numel))
    return BucketLayout(tuple(slots), shard_numel * policy.world_size, itemsize, policy.world_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
