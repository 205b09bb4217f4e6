"""The operations that the engine needs of a process group: reduce-scatter and all-gather of buckets, small messages.

All are launched asynchronously. ``backends.py`` chooses what carries buckets: torch's own collectives on GPUs, and none
at world size 1. Between CPUs, ranks exchange chunks, and sum by themselves. Gloo's own reduce-scatter is in fact an
all-reduce and sends about twice the bytes. Here each chunk is sent once to each rank that needs it. If nodes have
several ranks, a chunk is sent between nodes once per node. The number of messages of a bucket grows with that of ranks.

Whole parameters make parts of different length. They are carried as equal parts. If every rank sent each part to its
owner, the owner of a large matrix would receive N copies at once. So a bucket is reduce-scattered in equal parts, for
all owners. The sums are then passed on to their owners, each element once. To gather, owners first pass on what they
have stepped, then equal parts are gathered. Each direction costs a rank less than 1 / N of a bucket more in the mean. A
rank that owns all of a bucket sends one bucket more. For a bucket, a rank never receives more at once than the bucket's
length and its own part.

Small messages use recursive doubling: their number grows with the logarithm of the number of ranks. A ring, as in
Gloo's all-reduce, takes two latencies for each rank: milliseconds from a hundred ranks on.
"""

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import count, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.layout import even_bounds, parts_of
from lightning_parstrat.core.shard_groups import ShardGroups, piece_bounds
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.work import (
    DONE,
    Exchange,
    ExchangeThreads,
    Message,
    Steps,
    Work,
    launch,
    waiting,
)


class Tag(IntEnum):
    """The purpose of a message between two ranks. Messages of one tag arrive in the order in which both launch them."""

    BARRIER = 1
    """A rank that has not reached a barrier may send other messages meanwhile."""
    SMALL_REDUCTION = 2
    EXCHANGE = 8
    """Of the first step of an exchange of buckets. Each later step, which another thread launches, has the next
    number."""
    CONTROL_MESSAGE = 16
    """Of the first training. Each later training has the next number."""


Combine = Callable[[Tensor, Tensor], Tensor]
"""Makes one message of two. The message of lower ranks comes first."""


@functools.cache
def doubling_steps(rank: int, world_size: int) -> Sequence[tuple[int, bool, bool]]:
    """The steps of a rank, in order. After them, all ranks have combined the messages of all.

    Each step has the other rank, whether this rank sends to it, and whether this rank receives from it.

    Between 2^k ranks, each exchanges with k others. For another number, ranks beyond the largest power of two first
    send their message to a lower rank. They receive the result in the end: two latencies more.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section
    4.5.
    """
    taking_part = 1 << (world_size.bit_length() - 1)
    if rank >= taking_part:
        # Separate, as the other rank receives before it sends: both may need a connection, in one order.
        return [(rank - taking_part, True, False), (rank - taking_part, False, True)]
    found = [(rank ^ (1 << bit), True, True) for bit in range(taking_part.bit_length() - 1)]
    beyond = rank + taking_part
    if beyond < world_size:
        found = [(beyond, False, True), *found, (beyond, True, False)]
    return found


def existing(group: "weakref.ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    """The process group behind a weak reference.

    Raises:
        RuntimeError: The group has been destroyed.
    """
    found = group()
    if found is None:
        raise RuntimeError("The process group that this training communicated by has been destroyed.")
    return found


class Collectives(ABC):
    """The operations that the engine needs of a process group. Every method is collective and returns before its end.

    All ranks must launch the same operations in the same order. Before the returned :class:`Work` has been waited for,
    do not change or free the tensors.

    Args:
        group: The process group.
        groups: Which of its ranks share a copy of the sharded state. By default, all do.

    Attributes:
        shard_groups: Which ranks share a copy of the sharded state.
        place: Which shard of which copy belongs to this rank.
        mates: The ranks that share a copy with this one, in the order of their shards.
        shard_count: The number of these ranks.
        widens: Whether equal shards of gradients are sent in the dtype in which they are summed.
    """

    widens = False

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.shard_groups = groups or ShardGroups.of_all(self.world_size)
        self.place = self.shard_groups.place(self.rank)
        self.mates = self.shard_groups.mates(self.rank)
        self.shard_count = len(self.mates)
        # Weak, so that torch alone keeps the group alive: see `process_groups.py`.
        self._group = weakref.ref(group)
        self.bytes_sent = 0
        """The messages of this rank for buckets."""
        self._counting = threading.Lock()

    def __deepcopy__(self, _: object) -> "Collectives":
        """Returns itself: users copy a trainer in training, and a process group has no copy."""
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: The group has been destroyed.
        """
        return existing(self._group)

    def reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Sums ``buffer`` over all ranks and leaves this rank's shard of the sum in ``shard``.

        Args:
            buffer: 1-D, contiguous. Its content is undefined afterwards.
            shard: 1-D, as long as this rank's part. It is written when the returned work has been waited for. If its
                dtype is wider than the buffer's, sums between CPUs are made in the wider dtype.
            bounds: Shard s is ``buffer[bounds[s]:bounds[s + 1]]``. By default, all are equal.

        Returns:
            The work.
        """
        return self._reduce_scatter(buffer, shard, self._bounds(buffer, bounds))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Completes ``buffer`` in place on every rank. Each rank has written its own shard.

        Args:
            buffer: 1-D, contiguous.
            bounds: Shard s is ``buffer[bounds[s]:bounds[s + 1]]``. By default, all are equal.

        Returns:
            The work.
        """
        return self._all_gather(buffer, self._bounds(buffer, bounds))

    def connect(self, device: torch.device, reduces: bool = True) -> None:
        """Connects this rank with those with which it will exchange equal chunks. Collective: a byte or so to each.

        Otherwise they would be connected at their first message, within a backward. A rank that waits there for one
        that has ended waits for five timeouts. If they are connected, the end of the connection is noticed at once.

        Args:
            device: The device of the data that will be sent.
            reduces: Whether the data will be summed, or only gathered.
        """
        counted = self.bytes_sent
        # Several elements a shard: each rank that holds the shard sends the others one.
        buffer = torch.zeros(self.world_size, device=device)
        bounds = self._bounds(buffer, None)
        # If all ranks share one copy, both ways connect the same ranks.
        if reduces or self.place.copies == 1:
            self._reduce_scatter(buffer, buffer.new_empty(self.place.copies), bounds).wait()
        else:
            self._all_gather(buffer, bounds).wait()
        self.bytes_sent = counted

    def count(self, sent: int) -> None:
        """Adds the bytes that this rank sends to ``bytes_sent``. Any thread may call it."""
        # A thread may launch the second level of an exchange while the main thread launches the first of the next.
        with self._counting:
            self.bytes_sent += sent

    def wait(self, work: Work) -> None:
        """Waits, and counts the time as waiting for other ranks."""
        with waiting():
            work.wait()

    def _bounds(self, buffer: Tensor, bounds: Sequence[int] | None) -> Sequence[int]:
        return range(0, buffer.numel() + 1, buffer.numel() // self.shard_count) if bounds is None else bounds

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Combines a small tensor over all ranks, in place. For norms and flags, never for gradients.

        A tensor on the host uses recursive doubling. The first message is sent now, the others by the thread that
        waits.
        """
        if self.world_size == 1:
            return DONE
        self.count_small_reduction()
        if tensor.device.type == "cpu":
            return Exchange(self._reduce_on_host(tensor, _COMBINE[op]))
        how = dist.AllreduceOptions()
        how.reduceOp, how.asyncOp = dist.ReduceOp(op), True
        # This does the same as `dist.all_reduce`, with a sixth of the calls of Python.
        return self.group.allreduce([tensor], how)

    def _reduce_on_host(self, tensor: Tensor, combine: Combine) -> Steps:
        tensor.copy_((yield from self.doubling(tensor, combine, Tag.SMALL_REDUCTION)))

    def doubling(self, message: Tensor, combine: Combine, tag: int) -> Steps:
        """The steps of an exchange that combines messages on the host over all ranks, to the same bits on all.

        Args:
            message: This rank's: contiguous, and of the same length on all ranks. It must not change before the end.
            combine: Makes one message of two.
            tag: All exchanges of one tag are made by all ranks in the same order.
        """
        for peer, sends, receives in doubling_steps(self.rank, self.world_size):
            received = torch.empty_like(message)
            messages = [Message(False, received, peer)] * receives + [Message(True, message, peer)] * sends
            yield launch(self.group, messages, tag)
            if receives and not sends and peer < self.rank:
                # The answer, which already contains this rank's message.
                message = received
            elif receives:
                # In the order of ranks, so that both get the same bits.
                message = combine(message, received) if self.rank < peer else combine(received, message)
        return message

    def count_small_reduction(self) -> None:
        """Counts a small message that all ranks send and combine."""
        if self.world_size > 1:
            _SMALL_REDUCTIONS[self.group] = small_reductions_of(self.group) + 1

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work: ...

    @abstractmethod
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work: ...


_SMALL_REDUCTIONS: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


def small_reductions_of(group: dist.ProcessGroup) -> int:
    """How many small reductions this rank has launched by the group. If all are by it, the same on all."""
    return _SMALL_REDUCTIONS.get(group, 0)


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, or its components if it is complex: not all backends accept complex tensors. Sums are the same."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


Chunks = Mapping[int, Sequence[Tensor]]
"""The chunks for each rank, or from it. Both sides list the same ones in the same order."""

Tags = Iterator[int]
"""Tags of one exchange, a new one for each of its steps: another thread launches each step."""

_SUMMED_BY_WAITER = 2**19
"""Bytes of a buffer that is summed in some 50 microseconds. A thread takes longer to wake up."""


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its chunk. Each chunk is sent once.

    Rank r sends to r + 1, r + 2, ... in turn, so that no rank is the first target of all.

    Groups of ranks may hold a copy of the optimizer state each. Then sums are made over the ranks of a group first. A
    second sum is made over the ranks that hold the same shard, one of every group. With K groups of G ranks, a rank
    sends (G - 1) / G of a bucket within its group. To other groups it sends 2 (K - 1) / K of a shard. The second sum
    has the same bits on all of its ranks, so equal copies of a state stay equal. An all-gather stays within the group.
    """

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None) -> None:
        super().__init__(group, groups)
        self._threads = ExchangeThreads("exchange of chunks")
        self._has_several_steps = self.place.copies > 1
        self._holders = self.shard_groups.holders(self.rank)

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        if self.world_size == 1:
            # The shard's dtype may be wider.
            shard.copy_(buffer)
            return DONE
        is_even, tags = isinstance(bounds, range), count(Tag.EXCHANGE)
        # If even, this very generator: a generator around it would keep the buffer for longer.
        steps = self._sum_evenly if is_even else self._sum_for_owners
        exchange = Exchange(steps(buffer, shard, bounds, tags), self._threads)
        # By threads: they sum as soon as the chunks have arrived, while this thread computes the rest of backward.
        if self._has_several_steps or not is_even or buffer.nbytes > _SUMMED_BY_WAITER:
            exchange.hand_over()
        return exchange

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if self.shard_count == 1:
            return DONE
        exchange = Exchange(self._gather(buffer, bounds), self._threads)
        if self._has_several_steps or not isinstance(bounds, range):
            exchange.hand_over()
        return exchange

    def _sum_for_owners(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int], tags: Tags) -> Steps:
        equal = even_bounds(buffer.numel(), self.shard_count)
        sums = shard.new_empty(equal.step)
        yield from self._sum_evenly(buffer, sums, equal, tags)
        del buffer
        yield self._pass_on(sums, equal, shard, bounds, next(tags))

    def _gather(self, buffer: Tensor, bounds: Sequence[int]) -> Steps:
        tags, own = count(Tag.EXCHANGE), self.place.shard
        equal = even_bounds(buffer.numel(), self.shard_count)
        if not isinstance(bounds, range):
            stepped, part = buffer[bounds[own] : bounds[own + 1]], buffer[equal[own] : equal[own + 1]]
            yield self._pass_on(stepped, bounds, part, equal, next(tags))
        yield from self._gather_evenly(buffer, equal, tags)

    def _sum_evenly(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int], tags: Tags) -> Steps:
        parts = {mate: [chunk] for mate, chunk in zip(self.mates, split(buffer, bounds), strict=True)}
        (of_mates,) = yield from self._swap(parts, next(tags))
        sum_in_order(of_mates, shard)
        if self.place.copies > 1:
            del buffer, parts, of_mates
            yield from self._sum_between_groups(shard, tags)

    def _sum_between_groups(self, shard: Tensor, tags: Tags) -> Steps:
        """Each holder sums one piece, and sends the sum to all others, so that all have the same bits."""
        bounds = piece_bounds(shard.numel(), len(self._holders))
        pieces = {holder: [piece] for holder, piece in zip(self._holders, split(shard, bounds), strict=True)}
        (of_holders,) = yield from self._swap(pieces, next(tags))
        (own,) = pieces[self.rank]
        total = torch.empty_like(own)
        sum_in_order(of_holders, total)
        own.copy_(total)
        yield self._transfer(dict.fromkeys(pieces, (own,)), pieces, next(tags))

    def _gather_evenly(self, buffer: Tensor, bounds: range, tags: Tags) -> Steps:
        chunks = {mate: [chunk] for mate, chunk in zip(self.mates, split(buffer, bounds), strict=True)}
        yield self._transfer(dict.fromkeys(chunks, chunks[self.rank]), chunks, next(tags))

    def _pass_on(self, source: Tensor, had: Sequence[int], target: Tensor, wanted: Sequence[int], tag: int) -> Work:
        """Sends what this rank has to the ranks that need it, and receives what this rank needs.

        Args:
            source: This rank's part by the bounds ``had``.
            had: The bounds of what ranks have.
            target: Gets this rank's part by the bounds ``wanted``.
            wanted: The bounds of what ranks need.
            tag: See :meth:`_transfer`.
        """
        shard = self.place.shard
        arriving = {
            part.shard: target[part.start - wanted[shard] : part.stop - wanted[shard]]
            for part in parts_of(had, wanted[shard], wanted[shard + 1])
        }
        leaving = {
            part.shard: source[part.start - had[shard] : part.stop - had[shard]]
            for part in parts_of(wanted, had[shard], had[shard + 1])
        }
        kept, place = leaving.get(shard), arriving.get(shard)
        # In a gather, both are the same memory.
        if kept is not None and place is not None and kept.data_ptr() != place.data_ptr():
            place.copy_(kept)
        sent, received = ({self.mates[mate]: [part] for mate, part in one.items()} for one in (leaving, arriving))
        return self._transfer(sent, received, tag)

    def _swap(self, parts: Chunks, tag: int) -> Generator[Work, None, list[tuple[Tensor, ...]]]:
        """Sends some ranks their parts, and receives this rank's.

        Args:
            parts: The parts of each rank, this one included, in the order in which sums are made.
            tag: See :meth:`_transfer`.

        Returns:
            For each of this rank's parts, the parts of all ranks.
        """
        own = parts[self.rank]
        arriving = {rank: own if rank == self.rank else _like(own, part) for rank, part in parts.items()}
        yield self._transfer(parts, arriving, tag)
        return list(zip(*arriving.values(), strict=True))

    def _transfer(self, leaving: Chunks, arriving: Chunks, tag: int) -> Work:
        """Sends other ranks their chunks, and receives from them.

        Args:
            leaving: The chunks for each rank. They must be kept until the work has been waited for. Those for this
                rank are left out.
            arriving: The memory for what each rank sends.
            tag: All transfers of one tag are launched by one thread.
        """
        messages = [
            Message(sends, real_view(chunk), rank)
            for sends, chunks_of_ranks in ((False, arriving), (True, leaving))
            for rank, chunks in chunks_of_ranks.items()
            for chunk in chunks
            # Both sides know the sizes, so both leave out the same empty chunks.
            if rank != self.rank and chunk.numel()
        ]
        self.count(sum(message.tensor.nbytes for message in messages if message.sends))
        messages.sort(key=self._turn)
        return launch(self.group, messages, tag)

    def _turn(self, message: Message) -> tuple[bool, int]:
        """Where a message stands among those that are launched together."""
        # These messages may be the first between two ranks, and connect them: ranks with higher numbers first. And no
        # rank may be the first target of all.
        distance = message.peer - self.rank if message.sends else self.rank - message.peer
        return message.sends != (message.peer > self.rank), distance % self.world_size


class TwoLevelCollectives(PairwiseCollectives):
    """Exchanges within nodes, then between counterparts: the ranks with the same index on their nodes.

    It needs a topology with two levels. In a reduce-scatter, each rank first sums over its node the chunks of its
    counterparts and its own. Then it sends each counterpart one such sum. So with K nodes, a node sends (K - 1) / K of
    a bucket per phase. Its number of ranks R does not matter. A flat exchange sends R times as much, and a ring
    all-reduce up to 2 (N - 1) / N in both phases together. Every rank of the node sends the same share. An all-gather
    takes the same steps in reverse.

    Besides its bucket, a reduce-scatter holds (R - 1) / R of it for received chunks, then one chunk per other node.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        super().__init__(group)
        self._has_several_steps = True
        node_mates = topology.node_mates(self.rank)
        self._counterparts = topology.counterparts(self.rank)
        self._columns = {mate: topology.counterparts(mate) for mate in node_mates}

    @override
    def _sum_evenly(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int], tags: Tags) -> Steps:
        chunks = split(buffer, bounds)
        parts = {mate: [chunks[rank] for rank in column] for mate, column in self._columns.items()}
        by_counterpart = yield from self._swap(parts, next(tags))
        sums: dict[int, Sequence[Tensor]] = {}
        for rank, of_mates in zip(self._counterparts, by_counterpart, strict=True):
            narrow = of_mates[0].dtype
            total = of_mates[0] if shard.dtype == narrow else torch.empty_like(of_mates[0], dtype=shard.dtype)
            sum_in_order(of_mates, total)
            # The sent sum is narrow. This rank's own sum stays wide until the final addition.
            sums[rank] = [total if rank == self.rank else total.to(narrow)]
        del buffer, chunks, parts, by_counterpart, of_mates
        (of_nodes,) = yield from self._swap(sums, next(tags))
        sum_in_order(of_nodes, shard)

    @override
    def _gather_evenly(self, buffer: Tensor, bounds: range, tags: Tags) -> Steps:
        chunks = split(buffer, bounds)
        own = dict.fromkeys(self._counterparts, (chunks[self.rank],))
        of_counterparts = {rank: [chunks[rank]] for rank in self._counterparts}
        yield self._transfer(own, of_counterparts, next(tags))
        column = dict.fromkeys(self._columns, tuple(chunks[rank] for rank in self._counterparts))
        of_mates = {mate: [chunks[rank] for rank in ranks] for mate, ranks in self._columns.items()}
        yield self._transfer(column, of_mates, next(tags))


def _like(own: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Memory for chunks that are received for ``own``, in the dtypes of the chunks for others."""
    return [torch.empty_like(one, dtype=other.dtype) for one, other in zip(own, others, strict=True)]


def split(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Each rank's chunk of a buffer."""
    if isinstance(bounds, range) and bounds.step:
        return list(torch.split(buffer, bounds.step))
    return [buffer[start:stop] for start, stop in pairwise(bounds)]


def sum_in_order(chunks: Iterable[Tensor], total: Tensor) -> None:
    """Writes the sum into ``total``, in its dtype and in the order of ranks. ``total`` may be the first chunk."""
    first, *others = chunks
    # One pass over memory instead of a copy and an addition.
    if others and total.dtype == first.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        total.copy_(first)
    for chunk in others:
        total.add_(chunk)
