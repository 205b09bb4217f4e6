"""Reduce-scatter and all-gather as chunks that the ranks exchange, and local sums: what CPUs do.

Gloo's own reduce-scatter is an all-reduce in disguise and sends about twice the bytes. Here each chunk travels once to
whoever needs it; where nodes hold several ranks, ``two_level.py`` sends each chunk between nodes once per node.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.process_groups import Message, Tag
from lightning_parstrat.distributed.comm.work import ExchangeThread, Followed, SeenThrough, Transfers, Work

Counter = Literal["reduce_scatter_bytes", "all_gather_bytes", "all_reduce_bytes"]
"""Of what is sent, in ``traffic``."""

Chunks = Callable[[int], Sequence[Tensor]]
"""The chunks that go to a rank, or come from it; both sides list the same ones in the same order."""


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its chunk; each chunk travels once.

    Rank r sends to r + 1, r + 2, ... in turn, so that no rank is everyone's first target. The number of messages
    grows with the square of the world size, so this is for few ranks.
    """

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None) -> None:
        super().__init__(group, groups)
        self._sums = ExchangeThread("sum of gradients")

    @cached_property
    def _all(self) -> "Schedule":
        # Found when it is asked for: a control group, which asks for none, is looked up in every save and load.
        return self._schedule(range(self.world_size))

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        parts = {rank: [chunk] for rank, chunk in enumerate(split(buffer, bounds))}
        arrival, (of_ranks,) = self._swap(self._all, parts, "reduce_scatter_bytes")
        reduction = Followed(arrival, lambda: sum_in_order(of_ranks, shard))
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
            self._all, lambda _: [chunks[self.rank]], lambda source: [chunks[source]], "all_gather_bytes"
        )
        return Transfers(transfers, buffer)

    def _swap(
        self, schedule: "Schedule", parts: Mapping[int, Sequence[Tensor]], counted_as: Counter, tag: Tag = Tag.CHUNKS
    ) -> tuple[Transfers, list[tuple[Tensor, ...]]]:
        """Sends every rank of a schedule its parts, and receives this rank's.

        Args:
            schedule: Of the ranks.
            parts: Those of each rank, this one among them, in the order in which sums are made.
            counted_as: See :meth:`_exchange`.
            tag: See :meth:`_exchange`.

        Returns:
            Completes when all have arrived; and for each of this rank's parts, those that all ranks had.
        """
        own = parts[self.rank]
        arriving = {rank: own if rank == self.rank else _like(own, part) for rank, part in parts.items()}
        transfers = self._exchange(schedule, parts.__getitem__, arriving.__getitem__, counted_as, tag)
        sent = (one for part in parts.values() for one in part)
        return Transfers(transfers, *sent), list(zip(*arriving.values(), strict=True))

    def _schedule(self, ranks: Sequence[int]) -> "Schedule":
        """In which order this rank, one of ``ranks``, exchanges chunks with the others."""
        index, size = ranks.index(self.rank), len(ranks)
        return [(ranks[(index + step) % size], ranks[(index - step) % size]) for step in range(1, size)]

    def _exchange(
        self,
        schedule: "Schedule",
        outgoing: Chunks,
        incoming: Chunks,
        counted_as: Counter,
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
        sent = 0
        for target, source in schedule:
            # Both sides know the sizes, so both leave out the same empty chunks.
            for chunk in incoming(source):
                if chunk.numel():
                    messages.append(Message(False, real_view(chunk), source))
            for chunk in outgoing(target):
                if chunk.numel():
                    sent += chunk.nbytes
                    messages.append(Message(True, real_view(chunk), target))
        self.count(counted_as, sent)
        return self.point_to_point.launch(messages, tag)


_SUMMED_BY_WAITER = 2**19
"""Bytes of a buffer that is summed in some 50 microseconds: less than it takes a thread to wake up for it."""


Schedule = Sequence[tuple[int, int]]
"""To whom a rank sends and from whom it receives, step by step; found once, not for each bucket."""


def _like(own: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Memory for what comes in the place of ``own``, in the dtypes of what goes to others."""
    return [torch.empty_like(one, dtype=other.dtype) for one, other in zip(own, others, strict=True)]


def split(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Each rank's chunk of a buffer."""
    if isinstance(bounds, range) and bounds.step:
        return list(torch.split(buffer, bounds.step))
    return [buffer[start:stop] for start, stop in pairwise(bounds)]


def sum_in_order(chunks: Iterable[Tensor], total: Tensor) -> None:
    """Writes the sum into ``total``, in its dtype and in the order of ranks; ``total`` may be the first chunk."""
    first, *others = chunks
    # One pass over memory instead of a copy and an addition.
    if others and total.dtype == first.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        total.copy_(first)
    for chunk in others:
        total.add_(chunk)
