"""Bytes held per rank and bytes sent per step: the formulas that tests, reports and planners share.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
parameters home), whatever the number of micro-batches: as much as DDP's ring all-reduce. ZeRO: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_parstrat.core.layout import BucketLayout


class StepTraffic(NamedTuple):
    """What one rank does on the wire in one optimizer step, counted in payload bytes and in collectives."""

    reduce_scatters: int
    reduce_scatter_bytes: int
    all_gathers: int
    all_gather_bytes: int


def step_traffic(buckets: Sequence[BucketLayout], rank: int) -> StepTraffic:
    """The traffic of one step in which every bucket is reduced and gathered once, padding included.

    Args:
        buckets: The plan.
        rank: The rank that sends.

    Returns:
        For each bucket it sends away what the others own of the gradients, and what it owns of the parameters to each
        of the others. Where shards are equal, both are ``(world_size - 1) / world_size`` of the bucket; nothing at
        world size 1.
    """
    away = sum((bucket.numel - bucket.shard_numel(rank)) * bucket.itemsize for bucket in buckets)
    home = sum((bucket.world_size - 1) * bucket.shard_numel(rank) * bucket.itemsize for bucket in buckets)
    count = sum(bucket.world_size > 1 for bucket in buckets)
    return StepTraffic(count, away, count, home)


def owned_bytes(buckets: Sequence[BucketLayout], rank: int) -> int:
    """Bytes of parameters whose optimizer state ``rank`` holds; padding holds none."""
    return sum(piece.numel * bucket.itemsize for bucket in buckets for piece in bucket.shard_slices(rank))


def parameter_bytes(buckets: Sequence[BucketLayout]) -> int:
    """Bytes of all parameters in the plan, without padding."""
    return sum(slot.numel * bucket.itemsize for bucket in buckets for slot in bucket.slots)
