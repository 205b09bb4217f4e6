"""Reduce-scatter and all-gather as chunks that the ranks exchange, and local sums: what CPUs do.

Gloo's own reduce-scatter is an all-reduce in disguise and sends about twice the bytes. Here each chunk travels once to
whoever needs it; where nodes hold several ranks, ``two_level.py`` sends each chunk between nodes once per node.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.process_groups import Message, Tag
from lightning_parstrat.distributed.comm.work import ExchangeThread, SeenThrough, Transfers, Work

Chunks = Callable[[int], Sequence[Tensor]]
"""The chunks that go to a rank, or come from it; both sides list the same ones in the same order."""


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its chunk; each chunk travels once.

    Rank r sends to r + 1, r + 2, ... in turn, so that no rank is everyone's first target. The number of messages
    grows with the square of the world size, so this is for few ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, topology: Topology | None = None, groups: ShardGroups | None = None
    ) -> None:
        super().__init__(group, topology, groups)
        self._sums = ExchangeThread("sum of gradients")

    @cached_property
    def _all(self) -> "Schedule":
        # Found when it is asked for: a control group, which asks for none, is looked up in every save and load.
        return self._schedule(range(self.world_size))

    def _schedules_of(self, reduces: bool) -> Sequence["Schedule"]:
        """All that this rank goes through to sum a bucket up, or to gather it."""
        return [self._all]

    @override
    def connect(self, device: torch.device, reduces: bool = True) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        messages: list[Message] = []
        for schedule in self._schedules_of(reduces):
            for target, _, source in schedule:
                messages += [Message(False, torch.empty_like(byte), source), Message(True, byte, target)]
        Transfers(self.point_to_point.launch(messages)).wait()

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        by_rank = [
            chunks[rank] if rank == self.rank else torch.empty_like(chunks[self.rank])
            for rank in range(self.world_size)
        ]
        transfers = self._exchange(
            self._all, lambda rank: [chunks[rank]], lambda rank: [by_rank[rank]], "reduce_scatter_bytes"
        )
        reduction = SummedChunks(Transfers(transfers, buffer), by_rank, shard)
        # In a thread: the sum is made as soon as the chunks have arrived, while this thread computes the rest of
        # backward.
        work = SeenThrough(reduction.wait, self._sums)
        if buffer.nbytes > _SUMMED_BY_WAITER:
            work.hand_over()
        return work

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        transfers = self._exchange(
            self._all,
            lambda target: [chunks[self.rank]],
            lambda source: [chunks[source]],
            "all_gather_bytes",
        )
        return Transfers(transfers, buffer)

    def _schedule(self, ranks: Sequence[int]) -> "Schedule":
        """In which order this rank, one of ``ranks``, exchanges chunks with the others."""
        place, size = ranks.index(self.rank), len(ranks)
        steps = ((ranks[(place + step) % size], ranks[(place - step) % size]) for step in range(1, size))
        return [Meeting(target, self.topology.share_node(self.rank, target), source) for target, source in steps]

    def _exchange(
        self,
        schedule: "Schedule",
        outgoing: Chunks,
        incoming: Chunks,
        counted_as: Literal["reduce_scatter_bytes", "all_gather_bytes", "all_reduce_bytes"],
        tag: Tag = Tag.CHUNKS,
    ) -> list[Work]:
        """Sends every other rank of a schedule its chunks, and receives from it; empty ones are not sent.

        Args:
            schedule: Of the ranks that exchange.
            outgoing: What goes to a rank.
            incoming: Where to put what comes from a rank.
            counted_as: The counter of ``traffic`` that what is sent is added to.
            tag: All exchanges of one tag are launched by one thread.
        """
        messages: list[Message] = []
        sent = between_nodes = 0
        for target, is_near, source in schedule:
            # Both sides know the sizes, so both leave out the same empty chunks.
            for chunk in incoming(source):
                if chunk.numel():
                    messages.append(Message(False, real_view(chunk), source))
            for chunk in outgoing(target):
                if chunk.numel():
                    sent += chunk.nbytes
                    between_nodes += 0 if is_near else chunk.nbytes
                    messages.append(Message(True, real_view(chunk), target))
        self.count(counted_as, sent, between_nodes)
        return self.point_to_point.launch(messages, tag)


_SUMMED_BY_WAITER = 2**19
"""Bytes of a buffer that is summed in some 50 microseconds: less than it takes a thread to wake up for it."""


class Meeting(NamedTuple):
    """One step of an exchange."""

    target: int
    is_near: bool
    """Whether the target is on this node."""
    source: int


Schedule = Sequence[Meeting]
"""In which order a rank exchanges chunks with others; found once, not for each bucket."""


class SummedChunks:
    """Sums chunks once they have arrived, in rank order, so that the sum does not depend on which rank owns it.

    Args:
        transfers: Completes when the chunks have arrived.
        by_rank: The chunks.
        shard: Receives the sum, which is made in its dtype.
    """

    def __init__(self, transfers: Work, by_rank: list[Tensor], shard: Tensor) -> None:
        self._transfers = transfers
        self._by_rank = by_rank
        self._shard = shard

    def wait(self) -> None:
        """Blocks until the sum is made."""
        # A second wait has nothing to sum: the chunks have been freed.
        if not self._by_rank:
            return
        self._transfers.wait()
        sum_in_order(self._by_rank, self._shard)
        self._by_rank = []

    def is_completed(self) -> bool:
        """Whether the chunks have arrived, as far as the backend can tell."""
        return self._transfers.is_completed()


def split(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Each rank's chunk of a buffer."""
    if isinstance(bounds, range) and bounds.step:
        return list(torch.split(buffer, bounds.step))
    return [buffer[start:stop] for start, stop in pairwise(bounds)]


def sum_in_order(chunks: Iterable[Tensor], total: Tensor) -> None:
    """Writes the sum into ``total``, in whose dtype it is made; ``total`` may be the first of ``chunks``."""
    first, *others = chunks
    # One pass over memory instead of a copy and an addition.
    if others and total.dtype == first.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        total.copy_(first)
    for chunk in others:
        total.add_(chunk)
