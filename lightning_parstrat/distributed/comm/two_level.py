"""Exchange in two levels, where nodes hold several ranks: within a node, then between counterparts on different nodes.

Counterparts are the ranks at the same place of their nodes. In a reduce-scatter each rank first sums, over its node,
what belongs to its counterparts and itself, then sends each counterpart one such sum. So with K nodes a node sends
(K - 1) / K of a bucket per phase, whatever its number of ranks R, where flat exchange sends R times as much and a ring
all-reduce up to 2 (N - 1) / N in both phases together; every rank of the node sends the same share of it. An all-gather
goes the same way backward.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives, Schedule, split, sum_in_order
from lightning_parstrat.distributed.comm.process_groups import Tag
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Transfers, Work


class TwoLevelCollectives(PairwiseCollectives):
    """Exchanges within nodes and between counterparts; needs a topology that has two levels.

    Besides its bucket, a reduce-scatter holds (R - 1) / R of it for what it receives, then one chunk per other node.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        super().__init__(group, topology)
        self._node_mates = topology.node_mates(self.rank)
        self._counterparts = topology.counterparts(self.rank)
        self._columns = {mate: topology.counterparts(mate) for mate in self._node_mates}
        self._with_mates, self._with_counterparts = map(self._schedule, (self._node_mates, self._counterparts))
        # One thread per level, each waiting for one level only: a slow wire between nodes must not hold up exchanges
        # within. And one thread launches all exchanges of a tag, in the order of the caller's.
        self._within = ExchangeThread("exchange within nodes")
        self._between = ExchangeThread("exchange between nodes")

    @override
    def _schedules_of(self, reduces: bool) -> Sequence[Schedule]:
        return [self._with_mates, self._with_counterparts]

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        arriving = {mate: [torch.empty_like(chunks[rank]) for rank in self._counterparts] for mate in self._node_mates}
        # This rank's own chunks are summed where they lie.
        arriving[self.rank] = [chunks[rank] for rank in self._counterparts]
        transfers = self._exchange(
            self._with_mates,
            lambda target: [chunks[rank] for rank in self._columns[target]],
            arriving.__getitem__,
            "reduce_scatter_bytes",
        )
        work = ExchangedWork()

        def sum_within_node() -> None:
            Transfers(transfers).wait()
            self._reduce_between_nodes(self._sums_of_node(arriving, shard.dtype), shard, work)

        self._within.run(work, sum_within_node)
        return work

    def _sums_of_node(self, arriving: dict[int, list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Sums over the node, in ``dtype``, of the chunks of this rank's counterparts and its own; ready to be sent."""
        sums = []
        for rank, *of_mates in zip(self._counterparts, *(arriving[mate] for mate in self._node_mates), strict=True):
            narrow = of_mates[0].dtype
            total = of_mates[0] if dtype == narrow else torch.empty_like(of_mates[0], dtype=dtype)
            sum_in_order(of_mates, total)
            # What is sent on travels in the narrow dtype; this rank's own sum stays wide until the final addition.
            sums.append(total if rank == self.rank else total.to(narrow))
        return sums

    def _reduce_between_nodes(self, sums: list[Tensor], shard: Tensor, work: ExchangedWork) -> None:
        by_counterpart = dict(zip(self._counterparts, sums, strict=True))
        arriving = {
            rank: own if rank == self.rank else torch.empty_like(shard, dtype=own.dtype)
            for rank, own in by_counterpart.items()
        }
        transfers = self._exchange(
            self._with_counterparts,
            lambda target: [by_counterpart[target]],
            lambda source: [arriving[source]],
            "reduce_scatter_bytes",
            Tag.SUMS_BETWEEN,
        )

        def sum_between_nodes() -> None:
            Transfers(transfers, *sums).wait()
            sum_in_order(list(arriving.values()), shard)
            work.finish()

        self._between.run(work, sum_between_nodes)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        transfers = self._exchange(
            self._with_counterparts,
            lambda target: [chunks[self.rank]],
            lambda source: [chunks[source]],
            "all_gather_bytes",
        )
        work = ExchangedWork()

        def gather_within_node() -> None:
            Transfers(transfers).wait()
            within = self._exchange(
                self._with_mates,
                lambda target: [chunks[rank] for rank in self._counterparts],
                lambda source: [chunks[rank] for rank in self._columns[source]],
                "all_gather_bytes",
                Tag.GATHERS_BETWEEN,
            )
            self._within.run(work, lambda: self._finish_gather(within, work))

        self._between.run(work, gather_within_node)
        return work

    def _finish_gather(self, within_node: Sequence[Work], work: ExchangedWork) -> None:
        Transfers(within_node).wait()
        work.finish()
