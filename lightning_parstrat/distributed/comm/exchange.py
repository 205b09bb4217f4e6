"""Reduce-scatter and all-gather as chunks that the ranks exchange, and local sums: what CPUs do.

Gloo's own reduce-scatter is an all-reduce in disguise and sends about twice the bytes. Here each chunk travels once to
whoever needs it; where nodes hold several ranks, ``two_level.py`` sends each chunk between nodes once per node.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives, Work, as_work, real_view

Chunks = Callable[[int], Sequence[Tensor]]
"""What goes to a rank, or comes from it; both sides list the same chunks in the same order."""


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its chunk; each chunk travels once.

    Rank r talks to r + 1, r + 2, ... in turn, so that no rank is everyone's first partner. The number of messages
    grows with the square of the world size, so this is for the tens of ranks that train on CPUs, and for chunks that
    differ in length.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        super().__init__(group, topology)
        self._sums = ExchangeThread("sum of gradients")
        self._counting = threading.Lock()

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        by_rank = [
            chunks[rank] if rank == self.rank else torch.empty_like(chunks[self.rank])
            for rank in range(self.world_size)
        ]
        transfers = self._exchange(
            range(self.world_size), lambda rank: [chunks[rank]], lambda rank: [by_rank[rank]], "reduce_scatter_bytes"
        )
        reduction = SummedChunks(Transfers(transfers, buffer), by_rank, shard)
        if buffer.device.type != "cpu":
            # There the waiting stream waits, not a thread.
            return reduction
        work = ExchangedWork()

        def see_through() -> None:
            reduction.wait()
            work.finish()

        self._sums.run(work, see_through)
        return work

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        chunks = split(buffer, bounds)
        transfers = self._exchange(
            range(self.world_size),
            lambda target: [chunks[self.rank]],
            lambda source: [chunks[source]],
            "all_gather_bytes",
        )
        return Transfers(transfers, buffer)

    def _exchange(
        self,
        ranks: Sequence[int],
        outgoing: Chunks,
        incoming: Chunks,
        counted_as: Literal["reduce_scatter_bytes", "all_gather_bytes"],
        tag: int = 0,
    ) -> list[Work]:
        """Sends every other one of ``ranks`` its chunks, and receives from it; empty ones are not sent.

        Args:
            ranks: Those that exchange, this one among them.
            outgoing: What goes to a rank.
            incoming: Where to put what comes from a rank.
            counted_as: The counter of ``traffic`` that what is sent is added to.
            tag: Exchanges of one tag are launched by one thread, so that both sides have the same order of them.
        """
        operations = []
        place = ranks.index(self.rank)
        for step in range(1, len(ranks)):
            target, source = ranks[(place + step) % len(ranks)], ranks[(place - step) % len(ranks)]
            operations += [
                self._operation(dist.irecv, chunk, source, tag) for chunk in incoming(source) if chunk.numel()
            ]
            for chunk in outgoing(target):
                if chunk.numel():
                    self._count(counted_as, chunk, target)
                    operations.append(self._operation(dist.isend, chunk, target, tag))
        return [as_work(work) for work in dist.batch_isend_irecv(operations)] if operations else []

    def _operation(self, direction: Callable[..., Work | None], chunk: Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(direction, real_view(chunk), group=self.group, group_peer=peer, tag=tag)

    def _count(self, counter: str, chunk: Tensor, target: int) -> None:
        # The second level of an exchange is launched by a thread, while the main one may launch the next first level.
        with self._counting:
            setattr(self.traffic, counter, getattr(self.traffic, counter) + chunk.nbytes)
            if not self.topology.share_node(self.rank, target):
                self.traffic.between_nodes_bytes += chunk.nbytes


class Transfers:
    """Several transfers waited for as one; keeps the memory they use alive."""

    def __init__(self, transfers: Sequence[Work], *memory: Tensor) -> None:
        self._transfers: Sequence[Work] = transfers
        self._memory: tuple[Tensor, ...] = memory
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Blocks until all are done.

        Raises:
            RuntimeError: One of them has failed, as when another rank is gone. Whoever waits again is told so at once:
                Gloo would make that call wait until the timeout for those that were done by then.
        """
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks has failed before: {self._error}") from self._error
        try:
            for transfer in self._transfers:
                transfer.wait()
        except RuntimeError as error:
            self._error = error
            raise
        self._transfers, self._memory = (), ()

    def is_completed(self) -> bool:
        """Whether all are done, as far as the backend can tell."""
        return all(transfer.is_completed() for transfer in self._transfers)


class SummedChunks:
    """Chunks that are summed once they are there, in rank order, so that the sum does not depend on who owns it.

    Args:
        transfers: Bring the chunks.
        by_rank: The chunks.
        shard: Where the sum goes, and the dtype that it is made in.
    """

    def __init__(self, transfers: Work, by_rank: list[Tensor], shard: Tensor) -> None:
        self._transfers = transfers
        self._by_rank = by_rank
        self._shard = shard

    def wait(self) -> None:
        """Blocks until the sum is made."""
        if not self._by_rank:
            return
        self._transfers.wait()
        sum_in_order(self._by_rank, self._shard)
        self._by_rank = []

    def is_completed(self) -> bool:
        """Whether the chunks are there, as far as the backend can tell."""
        return self._transfers.is_completed()


def exchange_chunks(
    collectives: Collectives, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]]
) -> None:
    """Sends chunks to other ranks and waits for those that come: one-time transfers that no formula counts.

    Collective among those who exchange; nothing else is under way between them.

    Args:
        collectives: Of the group to use.
        outgoing: What goes to each rank.
        incoming: Where to put what comes from each rank, in the order in which it sends.
    """
    operations = [
        dist.P2POp(direction, real_view(chunk), group=collectives.group, group_peer=peer)
        for direction, chunks in ((dist.irecv, incoming), (dist.isend, outgoing))
        for peer, of_peer in chunks.items()
        for chunk in of_peer
    ]
    if operations:
        Transfers([as_work(work) for work in dist.batch_isend_irecv(operations)]).wait()


def split(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Each rank's chunk of a buffer."""
    return [buffer[start:stop] for start, stop in pairwise(bounds)]


def sum_in_order(chunks: Iterable[Tensor], total: Tensor) -> None:
    """Writes the sum into ``total``, in whose dtype it is made; ``total`` may be the first of ``chunks``."""
    first, *others = chunks
    if others and total.dtype == first.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        total.copy_(first)
    for chunk in others:
        total.add_(chunk)


class ExchangedWork:
    """An exchange that a thread sees through; what that raised is raised to whoever waits."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the exchange has ended.

        Raises:
            RuntimeError: It failed, as when another rank is gone.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks failed: {self._error}") from self._error

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Lets those who wait go on."""
        self._error = error
        self._done.set()


_Task = tuple[ExchangedWork, Callable[[], None]]


class ExchangeThread:
    """Does what follows exchanges, one after the other, as long as someone holds this.

    Args:
        name: For those who look at a process's threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def run(self, work: ExchangedWork, action: Callable[[], None]) -> None:
        """Calls ``action`` after those of earlier calls; if it raises, ``work`` has failed."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            # A daemon: an exchange with a rank that is gone must not keep this process from ending.
            threading.Thread(target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put((work, action))


@torch.no_grad()
def _run_tasks(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        work, action = task
        try:
            action()
        except BaseException as error:
            work.finish(error)
        # Until the next one comes, nothing may hold on to the buffers of the last.
        del task, work, action
