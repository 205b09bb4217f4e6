"""What a rank sends in a step, by formulas on the plan: the oracle of what collectives count.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
gathered parameters), whatever the number of micro-batches: as much as DDP's ring all-reduce. Where parameters stay
uncut it is ``Psi * 2 b`` at most in the mean over ranks, as sums are passed on to their owners. ZeRO: Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_parstrat.core.layout import BucketLayout, even_bounds, parts_of
from lightning_parstrat.core.shard_groups import ShardGroups, piece_bounds


class StepTraffic(NamedTuple):
    """What one rank does on the wire in one optimizer step, counted in payload bytes and in collectives."""

    reduce_scatters: int
    reduce_scatter_bytes: int
    all_gathers: int
    all_gather_bytes: int
    all_reduces: int = 0
    """Of shards, between groups of ranks that hold a copy each."""
    all_reduce_bytes: int = 0


def step_traffic(
    buckets: Sequence[BucketLayout],
    rank: int,
    gathered: Sequence[BucketLayout] | None = None,
    summed: Sequence[BucketLayout] | None = None,
    shard_groups: ShardGroups | None = None,
    native: bool = False,
) -> StepTraffic:
    """The traffic of one step in which every bucket is reduced and gathered once, padding included.

    For each bucket ``(world_size - 1) / world_size`` of it each way, also in two levels; nothing at world size 1. Where
    shards differ, the rank also passes on the sums that others own of its equal part, and what it owns of the
    parameters in others' equal parts: in the mean over ranks less than a ``world_size``-th of the bucket each way. With
    K shard groups it sends all that within its group, and ``2 (K - 1) / K`` of its part of the gradients to the ranks
    that hold the same.

    Args:
        buckets: The plan.
        rank: The rank that sends.
        gathered: The plan with the item sizes that parameters travel in, where gradients travel in others.
        summed: The plan with the item sizes that gradients are summed in, where they travel in others.
        shard_groups: Which ranks share a copy of what is sharded; by default all do.
        native: Whether a backend's own collectives carry equal parts, as on GPUs.
    """
    if not buckets:
        return StepTraffic(0, 0, 0, 0)
    groups = shard_groups or ShardGroups.of_all(buckets[0].world_size)
    place = groups.place(rank)
    reduced = gathered_bytes = between_groups = 0
    for bucket, wide, parameters in zip(buckets, summed or buckets, gathered or buckets, strict=True):
        equal = even_bounds(bucket.numel, bucket.world_size)
        others = (bucket.world_size - 1) * (bucket.numel // bucket.world_size)
        passed_on = moved(place.shard, equal, bucket.bounds), moved(place.shard, bucket.bounds, equal)
        reduced += others * bucket.itemsize + passed_on[0] * wide.itemsize
        gathered_bytes += (others + passed_on[1]) * parameters.itemsize
        # Between CPUs, sums are passed on to their owners when they are over all groups.
        numel = bucket.shard_numel(place.shard) if native else equal.step
        pieces = [stop - start for start, stop in pairwise(piece_bounds(numel, place.copies))]
        # To each other holder its piece, and the sum of one's own.
        between_groups += (numel + (place.copies - 2) * pieces[place.copy]) * wide.itemsize
    count = sum(bucket.world_size > 1 for bucket in buckets)
    several = place.copies > 1
    return StepTraffic(
        reduce_scatters=count,
        reduce_scatter_bytes=reduced,
        all_gathers=count,
        all_gather_bytes=gathered_bytes,
        all_reduces=len(buckets) * several,
        all_reduce_bytes=between_groups * several,
    )


def moved(shard: int, had: Sequence[int], wanted: Sequence[int]) -> int:
    """The elements of a shard by the bounds ``had`` that other shards have by ``wanted``."""
    return sum(part.numel for part in parts_of(wanted, had[shard], had[shard + 1]) if part.shard != shard)
