"""Bytes held per rank: the formulas that tests and planners share."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_parstrat.core.layout import BucketLayout, parameter_bytes


class BucketMemory(NamedTuple):
    """What the memory formulas need to know about a bucket.

    Attributes:
        layout: The plan.
        shard_itemsize: Bytes per element of what this rank steps, and of its reduced gradient.
        has_master_weights: Whether the stepped shard is an fp32 copy.
        state_per_element: Bytes of optimizer state per element that is stepped; Adam in fp32: 8.
    """

    layout: BucketLayout
    shard_itemsize: int
    has_master_weights: bool
    state_per_element: float


class HeldBytes(NamedTuple):
    """What one rank holds between two steps or two micro-batches, where gradients are not exposed."""

    parameters: int
    master_weights: int
    optimizer_state: int
    gradient_shards: int
    """Of the step before, or sums over the micro-batches so far."""
    full_gradients: int = 0
    """That wait for the last micro-batch."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def held_bytes(buckets: Sequence[BucketMemory], rank: int) -> HeldBytes:
    """What ``rank`` holds between two steps: with Adam in fp32 ``(4 + 12 / N) Psi`` bytes, padding included.

    While backward runs, gradients come on top: those of the buckets that are not complete, and in flight twice a
    bucket for each (what is sent and what is received) until it has arrived. Where the wire keeps up with backward
    those are two or three buckets; where it does not, ``max_inflight_buckets`` bounds them.

    Args:
        buckets: The plan.
        rank: The rank.
    """
    shards = [(bucket, bucket.layout.shard_numel(rank)) for bucket in buckets]
    return HeldBytes(
        parameters=sum(bucket.layout.numel * bucket.layout.itemsize for bucket in buckets),
        master_weights=sum(numel * bucket.shard_itemsize for bucket, numel in shards if bucket.has_master_weights),
        optimizer_state=round(
            sum(
                owned.numel * bucket.state_per_element
                for bucket in buckets
                for owned in bucket.layout.shard_slices(rank)
            )
        ),
        gradient_shards=sum(numel * bucket.shard_itemsize for bucket, numel in shards),
    )


def held_between_micro_batches(buckets: Sequence[BucketMemory], rank: int, in_shards: bool) -> HeldBytes:
    """What ``rank`` holds between two micro-batches of a step.

    With Adam in fp32 ``(8 + 8 / N) Psi`` bytes where gradients accumulate on every rank, and ``(4 + 12 / N) Psi`` where
    they do in the shards: as much as between two steps. Sums of 16 bits are made in fp32 in the shards.

    Args:
        buckets: The plan.
        rank: The rank.
        in_shards: Whether every micro-batch is reduced, and added up in the shards.
    """
    held = held_bytes(buckets, rank)
    if in_shards:
        sums = sum(bucket.layout.shard_numel(rank) * max(4, bucket.shard_itemsize) for bucket in buckets)
        return held._replace(gradient_shards=sums)
    return held._replace(gradient_shards=0, full_gradients=parameter_bytes([bucket.layout for bucket in buckets]))
