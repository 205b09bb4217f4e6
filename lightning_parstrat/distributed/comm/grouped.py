"""Collectives of groups of ranks that hold a copy of the optimizer state each: within a group, then between groups.

A reduce-scatter sums over the ranks of each group, then over those that hold the same shard, one of every group: with
K groups of G ranks, a rank sends (G - 1) / G of a bucket within its group, and 2 (K - 1) / K of a shard to others.
The second sum ends with the same bits on all of its ranks: copies of a state that began alike stay so. An all-gather
stays within the group.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.shard_groups import ShardGroups, piece_bounds
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives, split, sum_in_order
from lightning_parstrat.distributed.comm.process_groups import Tag
from lightning_parstrat.distributed.comm.streams import Streams
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Transfers, Work, as_work


class GroupedExchange(PairwiseCollectives):
    """Ranks exchange chunks with those of their group, then pieces of the shard with those who hold it, too.

    Both in the one process group that there is: no two ranks are together in both.

    Args:
        group: The process group of all ranks.
        groups: Who shares a copy.
    """

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups) -> None:
        super().__init__(group, groups)
        self._holders = groups.holders(self.rank)
        self._with_mates, self._with_holders = map(self._schedule, (self.mates, self._holders))
        self._between = ExchangeThread("sum of shards between groups")

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        parts = {mate: [chunk] for mate, chunk in zip(self.mates, split(buffer, bounds), strict=True)}
        arrival, (of_mates,) = self._swap(self._with_mates, parts, "reduce_scatter_bytes")
        self.traffic.all_reduces += 1
        work = ExchangedWork()

        def sum_within_group() -> None:
            arrival.wait()
            sum_in_order(of_mates, shard)
            self._reduce_between_groups(shard, work)

        self._sums.run(work, sum_within_group)
        return work

    def _reduce_between_groups(self, shard: Tensor, work: ExchangedWork) -> None:
        """Each holder sums one piece, and sends the sum to all others, so that all have the same bits."""
        bounds = piece_bounds(shard.numel(), len(self._holders))
        pieces = {holder: [piece] for holder, piece in zip(self._holders, split(shard, bounds), strict=True)}
        arrival, (of_holders,) = self._swap(self._with_holders, pieces, "all_reduce_bytes", Tag.SUMS_BETWEEN)

        def finish() -> None:
            arrival.wait()
            (own,) = pieces[self.rank]
            total = torch.empty_like(own)
            sum_in_order(of_holders, total)
            own.copy_(total)
            gathered = self._exchange(
                self._with_holders, lambda _: [own], pieces.__getitem__, "all_reduce_bytes", Tag.GATHERS_BETWEEN
            )
            Transfers(gathered, shard).wait()
            work.finish()

        self._between.run(work, finish)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        chunks = dict(zip(self.mates, split(buffer, bounds), strict=True))
        transfers = self._exchange(
            self._with_mates, lambda _: [chunks[self.rank]], lambda mate: [chunks[mate]], "all_gather_bytes"
        )
        return Transfers(transfers, buffer)


class GroupedNativeCollectives(Collectives):
    """torch's own collectives, by process groups of a group's ranks and of those that hold the same shard.

    Args:
        group: The process group of all ranks; it carries small messages.
        groups: Who shares a copy.
        within: Reduce-scatters and all-gathers among this rank's group.
        between: Makes what has the process group of those that hold this rank's shard; asked when first summing up.
        streams: Those of the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        groups: ShardGroups,
        within: Collectives,
        between: Callable[[], Collectives],
        streams: Streams,
    ) -> None:
        super().__init__(group, groups)
        self._within = within
        self.widens = within.widens
        # Only this host's thread counts.
        within.traffic = self.traffic
        self._between: Collectives | None = None
        self._make_between = between
        self._streams = streams
        self._beside = streams.another()

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        self.traffic.all_reduces += 1
        pieces = [stop - start for start, stop in pairwise(piece_bounds(shard.numel(), self.place.copies))]
        # As between CPUs: each sums a piece and sends the others the sum. No way takes less.
        own = (self.place.copies - 2) * pieces[self.place.copy] + shard.numel()
        self.traffic.all_reduce_bytes += own * shard.element_size()
        if self._between is None:
            self._between = self._make_between()
        current = self._streams.current()
        # The second sum begins after the first: on a stream of its own, so that backward does not wait for either.
        with self._streams.on(self._beside):
            self._streams.wait_for(current)
            self._within._reduce_scatter(buffer, shard, bounds).wait()
            second = as_work(self._between.group.allreduce([real_view(shard)]))
        # Both until somebody waits on the stream that they were allocated on.
        return Transfers([second], buffer, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return self._within._all_gather(buffer, bounds)
