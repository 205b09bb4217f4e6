"""Reduce-scatter by recursive halving and all-gather by recursive doubling: what many CPU ranks do."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.halving import halving_plan
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives, Schedule, split, sum_in_order
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Transfers, Work


class HalvingCollectives(PairwiseCollectives):
    """Exchanges in the rounds of :func:`~lightning_parstrat.core.halving.halving_plan`.

    Messages, connections and latencies grow with the logarithm of the world size, bytes do not grow. Sums are made in
    another order than by pairs, the same whoever looks. Besides its bucket a reduce-scatter holds nearly as much for
    what it receives; where nodes hold several ranks, either phase holds a copy of the bucket, too.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        super().__init__(group, topology)
        self._order, self._rounds = halving_plan(self.rank, self.topology)
        self._places = sorted(range(self.world_size), key=self._order.__getitem__)
        self._schedules = [self._schedule(of_round.ranks) for of_round in self._rounds]
        # A thread for each round, so that a bucket's second round does not hold up the first one of the next; and for
        # each phase, as one goes through the rounds backward: each thread only waits for what depends on earlier work
        # of threads before it, whatever other ranks do first.
        numbers = range(len(self._rounds))
        self._halving = [ExchangeThread(f"sums of round {number}") for number in numbers]
        self._doubling = [ExchangeThread(f"gathers of round {number}") for number in numbers]

    @override
    def _schedules_of(self, reduces: bool) -> Sequence[Schedule]:
        return self._schedules

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        reduction = _Reduction(ExchangedWork(), shard, buffer.dtype, bounds)
        self._halve(0, self._brought_into_order(buffer, bounds), reduction)
        return reduction.work

    def _halve(self, number: int, sums: Tensor, reduction: "_Reduction") -> None:
        """Sends each rank of a round the sums that it goes on with, and has the next round follow."""
        of_round, last = self._rounds[number], number == len(self._rounds) - 1
        sent = sums if of_round.sends_sums else sums.to(reduction.dtype)
        edges = [reduction.bounds[cut] - reduction.bounds[of_round.cuts[0]] for cut in of_round.cuts]
        blocks = dict(zip(of_round.ranks, split(sent, edges), strict=True))
        own = split(sums, edges)[of_round.place]
        by_rank = {
            rank: own if rank == self.rank else torch.empty_like(own, dtype=sent.dtype) for rank in of_round.ranks
        }
        transfers = self._exchange(
            self._schedules[number],
            lambda target: [blocks[target]],
            lambda source: [by_rank[source]],
            "reduce_scatter_bytes",
            2 * number,
        )

        def go_on() -> None:
            Transfers(transfers, sent).wait()
            total = reduction.shard if last else torch.empty_like(own, dtype=reduction.shard.dtype)
            sum_in_order(by_rank.values(), total)
            if last:
                reduction.work.finish()
            else:
                self._halve(number + 1, total, reduction)

        self._halving[number].run(reduction.work, go_on)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        gathered = buffer if isinstance(self._order, range) else torch.empty_like(buffer)
        gathering = _Gathering(ExchangedWork(), buffer, gathered, bounds)
        if gathered is not buffer:
            start, stop = (gathering.ordered_bounds[place] for place in self._rounds[-1].own)
            gathered[start:stop] = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        self._double(len(self._rounds) - 1, gathering)
        return gathering.work

    def _double(self, number: int, gathering: "_Gathering") -> None:
        """Sends all ranks of a round what this one has gathered so far, and has the round before it follow."""
        of_round = self._rounds[number]
        edges = [gathering.ordered_bounds[cut] for cut in of_round.cuts]
        blocks = {
            rank: gathering.gathered[start:stop]
            for rank, (start, stop) in zip(of_round.ranks, pairwise(edges), strict=True)
        }
        transfers = self._exchange(
            self._schedules[number],
            lambda target: [blocks[self.rank]],
            lambda source: [blocks[source]],
            "all_gather_bytes",
            2 * number + 1,
        )

        def go_on() -> None:
            Transfers(transfers, gathering.gathered).wait()
            if number:
                self._double(number - 1, gathering)
                return
            if gathering.gathered is not gathering.buffer:
                self._bring_back(gathering)
            gathering.work.finish()

        self._doubling[number].run(gathering.work, go_on)

    def _brought_into_order(self, buffer: Tensor, bounds: Sequence[int]) -> Tensor:
        if isinstance(self._order, range):
            return buffer
        chunks = split(buffer, bounds)
        return torch.cat([chunks[rank] for rank in self._order])

    def _bring_back(self, gathering: "_Gathering") -> None:
        chunks = split(gathering.gathered, gathering.ordered_bounds)
        torch.cat([chunks[place] for place in self._places], out=gathering.buffer)


class _Reduction(NamedTuple):
    """What a reduce-scatter goes through its rounds with; ``bounds`` are those of chunks in the order of the plan."""

    work: ExchangedWork
    shard: Tensor
    dtype: torch.dtype
    bounds: Sequence[int]


class _Gathering(NamedTuple):
    """What an all-gather goes through its rounds with; ``gathered`` has the chunks in the order of the plan."""

    work: ExchangedWork
    buffer: Tensor
    gathered: Tensor
    ordered_bounds: Sequence[int]
