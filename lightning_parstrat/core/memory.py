"""Bytes held per rank and bytes sent per step: the formulas that tests, reports and planners share.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
gathered parameters), whatever the number of micro-batches: as much as DDP's ring all-reduce. ZeRO: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.core.shard_groups import ShardGroups, even_bounds
from lightning_parstrat.core.topology import Topology


class StepTraffic(NamedTuple):
    """What one rank does on the wire in one optimizer step, counted in payload bytes and in collectives."""

    reduce_scatters: int
    reduce_scatter_bytes: int
    all_gathers: int
    all_gather_bytes: int
    between_nodes_bytes: int
    """The part of all phases that goes to other nodes."""
    all_reduces: int = 0
    """Of shards, between groups of ranks that hold a copy each."""
    all_reduce_bytes: int = 0


def step_traffic(
    buckets: Sequence[BucketLayout],
    rank: int,
    topology: Topology | None = None,
    gathered: Sequence[BucketLayout] | None = None,
    shard_groups: ShardGroups | None = None,
    summed: Sequence[BucketLayout] | None = None,
) -> StepTraffic:
    """The traffic of one step in which every bucket is reduced and gathered once, padding included.

    Args:
        buckets: The plan.
        rank: The rank that sends.
        topology: Which ranks share a node, where they exchange chunks in two levels; see :class:`Topology`.
        gathered: The plan with the item sizes that parameters travel in, where gradients travel in others.
        shard_groups: Which ranks share a copy of what is sharded; by default all do.
        summed: The plan with the item sizes that shards of gradients are summed in, where they travel in others.

    Returns:
        For each bucket it sends away what the others own of the gradients, and what it owns of the parameters to each
        of the others. Where shards are equal, both are ``(world_size - 1) / world_size`` of the bucket; nothing at
        world size 1. In two levels some of it is sent on: with K nodes of R ranks both are ``(R - 1) / R`` of the
        bucket within the node and ``(K - 1) / (K R)`` of it between nodes. With K shard groups it sends both within its
        group, and ``2 (K - 1) / K`` of its shard of the gradients to the ranks that hold the same.
    """
    if shard_groups is not None and shard_groups.copies > 1:
        return _grouped_traffic(buckets, gathered or buckets, summed or buckets, shard_groups, rank, topology)
    reductions = [_sent(bucket, rank, topology or Topology.flat(bucket.world_size)) for bucket in buckets]
    gathers = [_sent(bucket, rank, topology or Topology.flat(bucket.world_size)) for bucket in gathered or buckets]
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


def _grouped_traffic(
    reduced: Sequence[BucketLayout],
    gathered: Sequence[BucketLayout],
    summed: Sequence[BucketLayout],
    groups: ShardGroups,
    rank: int,
    topology: Topology | None,
) -> StepTraffic:
    nodes = topology or Topology.flat(groups.world_size)
    place, mates, holders = groups.place(rank), groups.mates(rank), groups.holders(rank)
    sent_to = dict.fromkeys((*mates, *holders), 0)
    reduce_scatter = all_gather = all_reduce = 0
    for to_reduce, to_gather, to_sum in zip(reduced, gathered, summed, strict=True):
        own = to_gather.shard_numel(place.shard) * to_gather.itemsize
        pieces = [stop - start for start, stop in pairwise(even_bounds(to_sum.shard_numel(place.shard), groups.copies))]
        for shard, mate in enumerate(mates):
            if mate != rank:
                away = to_reduce.shard_numel(shard) * to_reduce.itemsize
                reduce_scatter, all_gather = reduce_scatter + away, all_gather + own
                sent_to[mate] += away + own
        for copy, holder in enumerate(holders):
            if holder != rank:
                pieces_sent = (pieces[copy] + pieces[place.copy]) * to_sum.itemsize
                all_reduce += pieces_sent
                sent_to[holder] += pieces_sent
    count = len(reduced) if groups.size > 1 else 0
    between_nodes = sum(nbytes for other, nbytes in sent_to.items() if not nodes.share_node(rank, other))
    return StepTraffic(count, reduce_scatter, count, all_gather, between_nodes, len(reduced), all_reduce)


class _Sent(NamedTuple):
    """Bytes that one rank sends for one bucket."""

    reduced_within: int
    reduced_between: int
    gathered_within: int
    gathered_between: int


def _sent(bucket: BucketLayout, rank: int, topology: Topology) -> _Sent:
    size = [bucket.shard_numel(other) * bucket.itemsize for other in range(bucket.world_size)]
    if topology.has_two_levels:
        # A column: the chunks of this rank's counterparts and its own. Within the node it keeps that one and sends all
        # others away; between nodes it sends each counterpart one sum.
        column = sum(size[other] for other in topology.counterparts(rank))
        mates = len(topology.node_mates(rank)) - 1
        nodes = len(topology.counterparts(rank)) - 1
        return _Sent(sum(size) - column, column - size[rank], mates * column, nodes * size[rank])
    others = [other for other in range(bucket.world_size) if other != rank]
    within = [size[other] for other in others if topology.share_node(rank, other)]
    between = [size[other] for other in others if not topology.share_node(rank, other)]
    return _Sent(sum(within), sum(between), len(within) * size[rank], len(between) * size[rank])


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
