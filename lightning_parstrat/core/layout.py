"""Which rank owns which element of which parameter, in which bucket: one pure function, the same on every rank.

Buffers, collectives, optimizer and checkpoints all consume the plan that :func:`plan_buckets` returns. None of them
computes a different offset. The idea is that of Megatron-LM's distributed optimizer. Offsets count elements.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_parstrat.core.digests import digest

Partition = Literal["element", "parameter"]


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The properties of one parameter that the plan needs.

    Args:
        name: Its qualified name, for messages and for the fingerprint.
        shape: Its shape.
        dtype: The name of its dtype. All ranks must agree on the dtype.
        itemsize: Bytes per element.
        group: Parameters share a bucket only if their groups and partitions are equal. An example of a group is (dtype,
            device, optimizer).
        partition: ``"element"`` cuts a bucket into equal shards, also inside a parameter. ``"parameter"`` lets no
            parameter cross a shard boundary. The shards of one bucket then differ in length. Only over all buckets do
            the ranks own about the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    group: Hashable
    partition: Partition = "element"

    @property
    def numel(self) -> int:
        """Number of elements. A 0-d parameter has 1."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.itemsize


@dataclass(frozen=True, kw_only=True)
class LayoutPolicy:
    """How parameters are laid out in buckets.

    Args:
        world_size: Number of ranks that share the optimizer state.
        bucket_cap_bytes: A bucket is closed before it would exceed this, unless that leaves next to nothing in it.
        alignment_bytes: Parameters and shards start at multiples of this. 64 is a cache line. 256 is the alignment of a
            GPU's allocations, by which matrix products choose a kernel.
    """

    world_size: int
    bucket_cap_bytes: int
    alignment_bytes: int = 64


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

    @property
    def elements(self) -> slice:
        """The elements of the parameter that the rank owns, 1-D in storage order."""
        return slice(self.parameter_start, self.parameter_start + self.numel)


class Part(NamedTuple):
    """Elements ``[start, stop)`` of what is cut, all of which lie in ``shard``."""

    shard: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def parts_of(bounds: Sequence[int], start: int, stop: int) -> Iterator[Part]:
    """Which of the elements ``[start, stop)`` lie in which shard, in order. Shards without any are left out.

    Bisection finds each part in the logarithm of the world size.

    Args:
        bounds: Shard s has the elements ``[bounds[s], bounds[s + 1])``.
        start: The first element.
        stop: The element after the last, at most ``bounds[-1]``.
    """
    while start < stop:
        # Of shards that begin at the same element, only the last is not empty.
        shard = bisect_right(bounds, start) - 1
        end = min(stop, bounds[shard + 1])
        yield Part(shard, start, end)
        start = end


def even_bounds(numel: int, world_size: int) -> range:
    """The bounds of equal parts.

    Args:
        numel: Elements of all parts. It is a multiple of the world size, and not zero.
        world_size: Number of parts.
    """
    return range(0, numel + 1, numel // world_size)


class BucketLayout(NamedTuple):
    """One bucket, padding included: rank r owns the elements ``[bounds[r], bounds[r + 1])``.

    ``bounds`` has ``world_size + 1`` entries. If the shards are equal, ``bounds`` is a range, which costs nothing to
    keep. The number of elements is always a multiple of the world size. So any bucket can be cut into equal parts.
    """

    slots: tuple[Slot, ...]
    bounds: Sequence[int]
    itemsize: int

    @property
    def world_size(self) -> int:
        """Number of ranks that share the bucket."""
        return len(self.bounds) - 1

    @property
    def numel(self) -> int:
        """Elements in the bucket, padding included."""
        return self.bounds[-1]

    def shard_numel(self, rank: int) -> int:
        """Elements that ``rank`` owns, padding included."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def slice_of(self, slot: Slot, rank: int) -> ShardSlice:
        """The part of the slot's parameter that ``rank`` owns, maybe without elements."""
        start, stop = self.bounds[rank], self.bounds[rank + 1]
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
        if first >= last:
            return ShardSlice(slot.parameter, 0, 0, 0)
        return ShardSlice(slot.parameter, first - slot.offset, first - start, last - first)


def plan_buckets(parameters: Sequence[ParameterSpec], policy: LayoutPolicy) -> tuple[BucketLayout, ...]:
    """Assigns every parameter a slot in a bucket, and so every element an owner.

    Args:
        parameters: In the order in which their gradients are expected to become ready.
        policy: How to lay them out.

    Returns:
        The buckets in the order of their reductions, in which their last gradients are expected. The time is linear in
        the number of parameters, and independent of the world size. With ``"parameter"``, multiply by the logarithm of
        the world size, and add one number per rank and bucket.
    """
    groups = sorted(group_by_cap(parameters, policy.bucket_cap_bytes), key=lambda members: members[-1])
    owners = _choose_owners(parameters, policy.world_size)
    return tuple(_lay_out([(index, parameters[index]) for index in members], owners, policy) for members in groups)


def fingerprint(parameters: Sequence[ParameterSpec], buckets: Sequence[BucketLayout]) -> int:
    """A number that differs (but for chance) between ranks whose parameters or plans differ."""
    names = [(spec.name, spec.shape, spec.dtype) for spec in parameters]
    return digest((names, tuple(buckets)))


_SMALL = 32
"""A bucket with less than this part of the cap takes the next parameter along, however large that is. Otherwise a
norm's weights between two large matrices would be sent alone: a few bytes would pay the latency of a collective."""


def group_by_cap(parameters: Sequence[ParameterSpec], cap_bytes: int) -> list[list[int]]:
    """Groups the positions of parameters, in their order. A bucket is closed before it would exceed the cap."""
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    for index, spec in enumerate(parameters):
        group = spec.group, spec.partition
        if open_bytes.get(group, 0) * _SMALL > cap_bytes and open_bytes[group] + spec.nbytes > cap_bytes:
            closed.append(open_buckets.pop(group))
            open_bytes[group] = 0
        open_buckets.setdefault(group, []).append(index)
        open_bytes[group] = open_bytes.get(group, 0) + spec.nbytes
    return closed + list(open_buckets.values())


def _choose_owners(parameters: Sequence[ParameterSpec], world_size: int) -> dict[int, int]:
    """The rank that owns each uncut parameter: the largest first, to the rank with the fewest elements (bin packing).

    R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the fullest rank has at most 4/3 of the optimum.
    The order of the parameters does not matter.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owners: dict[int, int] = {}
    uncut = [index for index, spec in enumerate(parameters) if spec.partition == "parameter"]
    # Names decide ties, positions do not: the order of the parameters must not matter.
    for index in sorted(uncut, key=lambda index: (-parameters[index].numel, parameters[index].name)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + parameters[index].numel, owners[index]))
    return owners


def _lay_out(members: list[tuple[int, ParameterSpec]], owners: Mapping[int, int], policy: LayoutPolicy) -> BucketLayout:
    """Places one parameter after the other. If they have owners, those of one rank after those of another.

    Without owners, the shards are equal, and their boundaries may fall inside a parameter. With owners, a rank that
    owns none has an empty shard. The last rank is an exception: its shard has the padding. Collectives carry equal
    parts (see ``distributed/comm/collectives.py``).
    """
    itemsize = members[0][1].itemsize
    alignment = max(1, policy.alignment_bytes // itemsize)
    starts: dict[int, int] = {}
    ends: dict[int | None, int] = {}
    end = 0
    for index, spec in sorted(members, key=lambda member: owners.get(member[0], 0)):
        starts[index] = end
        ends[owners.get(index)] = end = _round_up(end + spec.numel, alignment)
    # At least one element, so that empty parameters need no special case. A multiple of the alignment times the world
    # size, so that all equal parts are aligned.
    numel = _round_up(max(end, 1), alignment * policy.world_size)
    slots = tuple(Slot(index, starts[index], spec.numel) for index, spec in members)
    if None in ends:
        return BucketLayout(slots, even_bounds(numel, policy.world_size), itemsize)
    bounds = [0]
    for rank in range(policy.world_size - 1):
        bounds.append(ends.get(rank, bounds[-1]))
    return BucketLayout(slots, (*bounds, numel), itemsize)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
