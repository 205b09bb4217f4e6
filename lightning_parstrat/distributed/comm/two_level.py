"""Exchange in two levels, where nodes hold several ranks: within a node, then between counterparts on different nodes.

Counterparts are the ranks with the same index on their nodes. In a reduce-scatter each rank first sums, over its node,
what belongs to its counterparts and itself, then sends each counterpart one such sum. So with K nodes a node sends
(K - 1) / K of a bucket per phase, whatever its number of ranks R, where flat exchange sends R times as much and a ring
all-reduce up to 2 (N - 1) / N in both phases together; every rank of the node sends the same share of it. An all-gather
goes the same way backward.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives, split, sum_in_order
from lightning_parstrat.distributed.comm.process_groups import Tag
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Transfers, Work


class TwoLevelCollectives(PairwiseCollectives):
    """Exchanges within nodes and between counterparts; needs a topology that has two levels.

    Besides its bucket, a reduce-scatter holds (R - 1) / R of it for what it receives, then one chunk per other node.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        super().__init__(group)
        self._node_mates = topology.node_mates(self.rank)
        self._counterparts = topology.counterparts(self.rank)
        self._columns = {mate: topology.counterparts(mate) for mate in self._node_mates}
        self._with_mates, self._with_counterparts = map(self._schedule, (self._node_mates, self._counterparts))
        # One thread per level, each waiting for one level only: a slow wire between nodes must not hold up exchanges
        # within. And one thread launches all exchanges of a tag, in the order of the caller's.
        self._within = ExchangeThread("exchange within nodes")
        self._between = ExchangeThread("exchange between nodes")

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        parts = {mate: [chunks[rank] for rank in column] for mate, column in self._columns.items()}
        arrival, by_counterpart = self._swap(self._with_mates, parts, "reduce_scatter_bytes")
        work = ExchangedWork()

        def sum_within_node() -> None:
            arrival.wait()
            sums: dict[int, Sequence[Tensor]] = {}
            for rank, of_mates in zip(self._counterparts, by_counterpart, strict=True):
                narrow = of_mates[0].dtype
                total = of_mates[0] if shard.dtype == narrow else torch.empty_like(of_mates[0], dtype=shard.dtype)
                sum_in_order(of_mates, total)
                # What is sent is narrow. This rank's own sum stays wide until the final addition.
                sums[rank] = [total if rank == self.rank else total.to(narrow)]
            self._reduce_between_nodes(sums, shard, work)

        self._within.run(work, sum_within_node)
        return work

    def _reduce_between_nodes(self, sums: Mapping[int, Sequence[Tensor]], shard: Tensor, work: ExchangedWork) -> None:
        arrival, (of_nodes,) = self._swap(self._with_counterparts, sums, "reduce_scatter_bytes", Tag.SUMS_BETWEEN)

        def sum_between_nodes() -> None:
            arrival.wait()
            sum_in_order(of_nodes, shard)
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
