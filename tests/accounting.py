"""What a rank sends in a step, by formulas on the plan: the oracle of what collectives count.

With Psi parameters of b bytes on N ranks, a step sends ``(N - 1) / N * Psi * 2 b`` bytes per rank (gradients out,
gathered parameters), whatever the number of micro-batches: as much as DDP's ring all-reduce. Where each of K
micro-batches is reduced, gradients go out K times: ``(N - 1) / N * Psi * (K + 1) b``. Where parameters stay
uncut it is ``Psi * 2 b`` at most in the mean over ranks, as sums are passed on to their owners. ZeRO: Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_parstrat.core.layout import BucketLayout, even_bounds, parts_of
from lightning_parstrat.core.shard_groups import ShardGroups, piece_bounds
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel


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
    summed: Sequence[BucketLayout] | None = None,
    shard_groups: ShardGroups | None = None,
    native: bool = False,
    micro_batches: int = 1,
) -> StepTraffic:
    """The traffic of one step in which every bucket is gathered once, and reduced once or more, padding included.

    Args:
        buckets: The plan.
        rank: The rank that sends.
        topology: Which ranks share a node, where they exchange chunks in two levels; see :class:`Topology`.
        gathered: The plan with the item sizes that parameters travel in, where gradients travel in others.
        summed: The plan with the item sizes that gradients are summed in, where they travel in others.
        shard_groups: Which ranks share a copy of what is sharded; by default all do.
        native: Whether a backend's own collectives carry equal parts, as on GPUs: what goes between nodes is then not
            counted.
        micro_batches: How often every bucket is reduced.

    Returns:
        For each bucket ``(world_size - 1) / world_size`` of it each way: what the others get of the gradients, and its
        equal part of the parameters to each of the others; nothing at world size 1. In two levels some of it is sent
        on: with K nodes of R ranks both are ``(R - 1) / R`` of the bucket within the node and ``(K - 1) / (K R)`` of it
        between nodes. Where shards differ, the rank also passes on the sums that others own of
        its equal part, and what it owns of the parameters in others' equal parts: in the mean over ranks less than a
        ``world_size``-th of the bucket each way. With K shard groups it sends all that within its group, and
        ``2 (K - 1) / K`` of its part of the gradients to the ranks that hold the same.
    """
    if not buckets:
        return StepTraffic(0, 0, 0, 0, 0)
    groups = shard_groups or ShardGroups.of_all(buckets[0].world_size)
    # Which way a backend takes between nodes is not known.
    flat = Topology.flat(groups.world_size)
    ranks = _Ranks(rank, groups, flat if native or topology is None else topology)
    shard, copies = groups.place(rank).shard, groups.copies
    reductions, gathers, between_groups = [], [], []
    for bucket, wide, home in zip(buckets, summed or buckets, gathered or buckets, strict=True):
        equal = even_bounds(bucket.numel, bucket.world_size)
        reductions.append(ranks.exchanged(bucket).plus(ranks.passed_on(wide, equal, bucket.bounds)))
        gathers.append(ranks.exchanged(home).plus(ranks.passed_on(home, bucket.bounds, equal)))
        # Between CPUs, sums are passed on to their owners when they are over all groups.
        between_groups.append(ranks.all_reduced(bucket.shard_numel(shard) if native else equal.step, wide.itemsize))
    count = sum(bucket.world_size > 1 for bucket in buckets)
    reductions, between_groups = reductions * micro_batches, between_groups * micro_batches
    return StepTraffic(
        reduce_scatters=count * micro_batches,
        reduce_scatter_bytes=sum(one.within + one.between for one in reductions),
        all_gathers=count,
        all_gather_bytes=sum(one.within + one.between for one in gathers),
        between_nodes_bytes=sum(one.between for one in (*reductions, *gathers, *between_groups)),
        all_reduces=len(buckets) * micro_batches if copies > 1 else 0,
        all_reduce_bytes=sum(one.within + one.between for one in between_groups),
    )


class _Sent(NamedTuple):
    """Bytes that one rank sends for one bucket, one way: within its node, and to others."""

    within: int
    between: int

    def plus(self, other: "_Sent") -> "_Sent":
        return _Sent(self.within + other.within, self.between + other.between)


class _Ranks:
    """Whom one rank sends what.

    Args:
        rank: The rank.
        groups: Which ranks share a copy.
        nodes: Which ranks share a node.
    """

    def __init__(self, rank: int, groups: ShardGroups, nodes: Topology) -> None:
        self._rank = rank
        self._nodes = nodes
        self._place, self._mates, self._holders = groups.place(rank), groups.mates(rank), groups.holders(rank)
        self._levels: list[tuple[Sequence[int], int]] = [(self._mates, 1)]
        """Those that exchange equal parts, and how many parts each of them gets."""
        if groups.copies == 1 and nodes.has_two_levels:
            counterparts = nodes.counterparts(rank)
            self._levels = [(nodes.node_mates(rank), len(counterparts)), (counterparts, 1)]

    def exchanged(self, bucket: BucketLayout) -> _Sent:
        """In a reduce-scatter or an all-gather of equal parts."""
        part, sent = bucket.numel // bucket.world_size * bucket.itemsize, _Sent(0, 0)
        for ranks, parts in self._levels:
            sent = sent.plus(self._to_others(ranks, parts * part))
        return sent

    def passed_on(self, bucket: BucketLayout, had: Sequence[int], wanted: Sequence[int]) -> _Sent:
        """What the rank has by the bounds ``had`` and others of its group want by ``wanted``."""
        sent, shard = _Sent(0, 0), self._place.shard
        for part in parts_of(wanted, had[shard], had[shard + 1]):
            sent = sent.plus(self._to_others([self._rank, self._mates[part.shard]], part.numel * bucket.itemsize))
        return sent

    def all_reduced(self, numel: int, itemsize: int) -> _Sent:
        """Between groups: to each of those who hold the same its piece of what there is, and the sum of one's own."""
        bounds, sent = piece_bounds(numel, len(self._holders)), _Sent(0, 0)
        pieces = [stop - start for start, stop in pairwise(bounds)]
        for holder, piece in zip(self._holders, pieces, strict=True):
            sent = sent.plus(self._to_others([self._rank, holder], (piece + pieces[self._place.copy]) * itemsize))
        return sent

    def _to_others(self, ranks: Sequence[int], nbytes: int) -> _Sent:
        others = [rank for rank in ranks if rank != self._rank]
        mates = sum(self._nodes.share_node(self._rank, other) for other in others)
        return _Sent(mates * nbytes, (len(others) - mates) * nbytes)


def traffic_of(engine: ShardedDataParallel, micro_batches: int = 1) -> StepTraffic:
    """What this rank sends in a step that uses all parameters and exposes no gradients.

    Args:
        engine: What sends it.
        micro_batches: Of the step; those before the last count where they are reduced, too.
    """
    reducer = engine.reducer
    widens = reducer.collectives.widens
    adds_up = reducer.shards_accumulation and micro_batches > 1
    sums = {bucket: bucket.sum_dtype if adds_up else bucket.shard_dtype for bucket in engine.buckets}
    travel = {bucket: wide if widens else bucket.reduce_dtype for bucket, wide in sums.items()}
    return step_traffic(
        [bucket.layout._replace(itemsize=dtype.itemsize) for bucket, dtype in travel.items()],
        reducer.collectives.rank,
        engine.topology,
        [bucket.layout._replace(itemsize=bucket.gather_dtype.itemsize) for bucket in engine.buckets],
        [bucket.layout._replace(itemsize=wide.itemsize) for bucket, wide in sums.items()],
        engine.shard_groups,
        widens or any(bucket.device.type != "cpu" for bucket in engine.buckets),
        micro_batches if reducer.shards_accumulation else 1,
    )
