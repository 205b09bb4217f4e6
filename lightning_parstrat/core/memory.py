"""Bytes held per rank and bytes sent per step: the formulas that tests, reports and planners share.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
gathered parameters), whatever the number of micro-batches: as much as DDP's ring all-reduce. Where parameters stay
uncut it is ``Psi * 2 b`` at most in the mean over ranks, as sums are passed on to their owners. ZeRO: Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_parstrat.core.halving import HalvingPlan, HalvingRound, halving_plan
from lightning_parstrat.core.layout import BucketLayout, even_bounds, parts_of
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
    summed: Sequence[BucketLayout] | None = None,
    native: bool = False,
) -> StepTraffic:
    """The traffic of one step in which every bucket is reduced and gathered once, padding included.

    Args:
        buckets: The plan.
        rank: The rank that sends.
        topology: Which ranks share a node, where they exchange chunks in two levels; see :class:`Topology`.
        gathered: The plan with the item sizes that parameters travel in, where gradients travel in others.
        summed: The plan with the item sizes that gradients are summed in, where they travel in others.
        native: Whether a backend's own collectives carry equal parts, as on GPUs: no partial sum travels in a wider
            dtype.

    Returns:
        For each bucket ``(world_size - 1) / world_size`` of it each way: what the others get of the gradients, and its
        equal part of the parameters to each of the others; nothing at world size 1. In two levels some of it is sent
        on: with K nodes of R ranks both are ``(R - 1) / R`` of the bucket within the node and ``(K - 1) / (K R)`` of it
        between nodes. Many CPU ranks exchange in rounds (``halving.py``), of as many bytes; where gradients are summed
        in a wider dtype, sums travel in it. Where shards differ, the rank also passes on the sums that others own of
        its equal part, and what it owns of the parameters in others' equal parts: in the mean over ranks less than a
        ``world_size``-th of the bucket each way.
    """
    if not buckets:
        return StepTraffic(0, 0, 0, 0, 0)
    topology = topology or Topology.flat(buckets[0].world_size)
    plan = halving_plan(rank, topology)
    reductions, gathers = [], []
    for bucket, wide, home in zip(buckets, summed or buckets, gathered or buckets, strict=True):
        equal = even_bounds(bucket.numel, bucket.world_size)
        reduced = _reduced(bucket, bucket.itemsize if native else wide.itemsize, plan, topology)
        reductions.append(reduced.plus(_passed_on(wide, rank, topology, equal, bucket.bounds)))
        gathers.append(_gathered(home, plan, topology).plus(_passed_on(home, rank, topology, bucket.bounds, equal)))
    count = sum(bucket.world_size > 1 for bucket in buckets)
    return StepTraffic(
        reduce_scatters=count,
        reduce_scatter_bytes=sum(one.within + one.between for one in reductions),
        all_gathers=count,
        all_gather_bytes=sum(one.within + one.between for one in gathers),
        between_nodes_bytes=sum(one.between for one in (*reductions, *gathers)),
    )


class _Sent(NamedTuple):
    """Bytes that one rank sends for one bucket, one way: within its node, and to others."""

    within: int
    between: int

    def plus(self, other: "_Sent") -> "_Sent":
        return _Sent(self.within + other.within, self.between + other.between)


def _reduced(bucket: BucketLayout, summed_itemsize: int, plan: HalvingPlan, topology: Topology) -> _Sent:
    """In a reduce-scatter of equal parts: to each of the others what it goes on with."""
    part, sent = bucket.numel // bucket.world_size, _Sent(0, 0)
    for of_round in plan.rounds:
        block = part * of_round.cuts.step * (summed_itemsize if of_round.sends_sums else bucket.itemsize)
        sent = sent.plus(_to_others(of_round, block, topology))
    return sent


def _gathered(bucket: BucketLayout, plan: HalvingPlan, topology: Topology) -> _Sent:
    """In an all-gather of equal parts: to each of the others what this rank has gathered."""
    part, sent = bucket.numel // bucket.world_size, _Sent(0, 0)
    for of_round in plan.rounds:
        sent = sent.plus(_to_others(of_round, part * of_round.cuts.step * bucket.itemsize, topology))
    return sent


def _to_others(of_round: HalvingRound, block: int, topology: Topology) -> _Sent:
    rank = of_round.ranks[of_round.place]
    mates = sum(topology.share_node(rank, other) for other in of_round.ranks) - 1
    return _Sent(mates * block, (len(of_round.ranks) - 1 - mates) * block)


def _passed_on(bucket: BucketLayout, rank: int, topology: Topology, had: Sequence[int], wanted: Sequence[int]) -> _Sent:
    """What the rank has by the bounds ``had`` and others want by ``wanted``."""
    within = between = 0
    for part in parts_of(wanted, had[rank], had[rank + 1]):
        if not topology.share_node(rank, part.rank):
            between += part.numel * bucket.itemsize
        elif part.rank != rank:
            within += part.numel * bucket.itemsize
    return _Sent(within, between)


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
