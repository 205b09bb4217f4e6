"""Bytes held per rank and bytes sent per step: the formulas that tests, reports and planners share.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
gathered parameters), whatever the number of micro-batches: as much as DDP's ring all-reduce. ZeRO: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_parstrat.core.halving import HalvingPlan, halving_plan
from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.core.topology import Topology


class StepTraffic(NamedTuple):
    """What one rank does on the wire in one optimizer step, counted in payload bytes and in collectives."""

    reduce_scatters: int
    reduce_scatter_bytes: int
    all_gathers: int
    all_gather_bytes: int
    between_nodes_bytes: int
    """The part of both phases that goes to other nodes."""


def step_traffic(
    buckets: Sequence[BucketLayout],
    rank: int,
    topology: Topology | None = None,
    gathered: Sequence[BucketLayout] | None = None,
    summed_itemsizes: Sequence[int] | None = None,
) -> StepTraffic:
    """The traffic of one step in which every bucket is reduced and gathered once, padding included.

    Args:
        buckets: The plan.
        rank: The rank that sends.
        topology: Which ranks share a node, where they exchange chunks in two levels; see :class:`Topology`.
        gathered: The plan with the item sizes that parameters travel in, where gradients travel in others.
        summed_itemsizes: Of what each bucket's gradients are summed in, where that is wider than what they travel in.

    Returns:
        For each bucket it sends away what the others own of the gradients, and what it owns of the parameters to each
        of the others. Where shards are equal, both are ``(world_size - 1) / world_size`` of the bucket; nothing at
        world size 1. In two levels some of it is sent on: with K nodes of R ranks both are ``(R - 1) / R`` of the
        bucket within the node and ``(K - 1) / (K R)`` of it between nodes. Many ranks exchange in rounds
        (``halving.py``), of as many bytes; where gradients are summed in a wider dtype, sums travel in it.
    """
    if not buckets:
        return StepTraffic(0, 0, 0, 0, 0)
    topology = topology or Topology.flat(buckets[0].world_size)
    plan = halving_plan(rank, topology)
    summed = summed_itemsizes or [bucket.itemsize for bucket in buckets]
    reductions = [_sent(*one, plan, rank, topology) for one in zip(buckets, summed, strict=True)]
    gathers = [_sent(bucket, bucket.itemsize, plan, rank, topology) for bucket in gathered or buckets]
    count = sum(bucket.world_size > 1 for bucket in buckets)
    return StepTraffic(
        reduce_scatters=count,
        reduce_scatter_bytes=sum(one.reduced_within + one.reduced_between for one in reductions),
        all_gathers=count,
        all_gather_bytes=sum(one.gathered_within + one.gathered_between for one in gathers),
        between_nodes_bytes=sum(
            r.reduced_between + g.gathered_between for r, g in zip(reductions, gathers, strict=True)
        ),
    )


class _Sent(NamedTuple):
    """Bytes that one rank sends for one bucket."""

    reduced_within: int
    reduced_between: int
    gathered_within: int
    gathered_between: int


def _sent(bucket: BucketLayout, summed_itemsize: int, plan: HalvingPlan, rank: int, topology: Topology) -> _Sent:
    begins = list(accumulate((bucket.shard_numel(owner) for owner in plan.order), initial=0))
    reduced, gathered = Counter[bool](), Counter[bool]()
    for of_round in plan.rounds:
        # A reduce-scatter sends each of the others what it goes on with, an all-gather what this rank has gathered.
        itemsize = summed_itemsize if of_round.sends_sums else bucket.itemsize
        blocks = [begins[stop] - begins[start] for start, stop in pairwise(of_round.cuts)]
        for other, block in zip(of_round.ranks, blocks, strict=True):
            if other != rank:
                is_near = topology.share_node(rank, other)
                reduced[is_near] += block * itemsize
                gathered[is_near] += blocks[of_round.place] * bucket.itemsize
    return _Sent(reduced[True], reduced[False], gathered[True], gathered[False])


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
    """What one rank holds between two steps, where gradients are not exposed."""

    parameters: int
    master_weights: int
    optimizer_state: int
    gradient_shards: int

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


def owned_bytes(buckets: Sequence[BucketLayout], rank: int) -> int:
    """Bytes of parameters whose optimizer state ``rank`` holds; padding holds none."""
    return sum(owned.numel * bucket.itemsize for bucket in buckets for owned in bucket.shard_slices(rank))


def parameter_bytes(buckets: Sequence[BucketLayout]) -> int:
    """Bytes of all parameters in the plan, without padding."""
    return sum(slot.numel * bucket.itemsize for bucket in buckets for slot in bucket.slots)
