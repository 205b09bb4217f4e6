"""What the engine asks of a process group: reduce-scatter and all-gather of flat buckets, and small messages.

All are launched asynchronously. ``backends.py`` says what carries buckets: torch's own collectives on GPUs, and none at
world size 1. Between CPUs ranks exchange chunks, and sum by themselves: Gloo's own reduce-scatter is an all-reduce in
disguise and sends about twice the bytes. Here each chunk travels once to whoever needs it. Where nodes hold several
ranks, it travels between nodes once per node.

Parts of different length, as whole parameters make them, are carried as equal ones: were each part sent to its owner by
every rank, the owner of a large matrix would receive N copies of it at once. So a bucket is reduce-scattered in equal
parts, however it is owned, and the sums are passed on to their owners, each element once. To gather, owners first pass
on what they have stepped, then equal parts are gathered. Each way a rank sends less than 1 / N of a bucket more in the
mean, and one that owns all of it a bucket; for a bucket a rank never receives more at once than its length and its own
part of it.

Small messages go by recursive doubling: their number grows with the logarithm of the ranks'. A ring, as Gloo's
all-reduce is one, takes two latencies for each rank: milliseconds from a hundred ranks on.
"""

import functools
import operator
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

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
    as_work,
    launch,
)


class Tag(IntEnum):
    """What a message between two ranks belongs to: those of one tag arrive in the order in which both launch them."""

    BARRIER = 1
    """A rank that has not come to a barrier may send other messages meanwhile."""
    SMALL_REDUCTION = 2
    EXCHANGE = 8
    """Of the first step of an exchange of buckets; each later step, which another thread launches, has the next."""
    CONTROL_MESSAGE = 16
    """Of the first training. Each later training has the next number."""


Combine = Callable[[Tensor, Tensor], Tensor]
"""Makes one message of two, of which that of lower ranks comes first."""


class Step(NamedTuple):
    """One step of recursive doubling.

    Attributes:
        peer: The other rank.
        sends: Whether this rank sends to it.
        receives: Whether this rank receives from it.
    """

    peer: int
    sends: bool
    receives: bool


@functools.cache
def doubling_steps(rank: int, world_size: int) -> Sequence[Step]:
    """The steps of a rank, in order, after which all ranks have combined the messages of all.

    Between 2^k ranks each exchanges with k others. Of another number, those beyond the largest power of two first send
    their message to a lower rank, and receive the result in the end: two latencies more.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section
    4.5.
    """
    taking_part = 1 << (world_size.bit_length() - 1)
    if rank >= taking_part:
        # Apart, as the other receives before it sends: they may have to be connected for either, in one order.
        return [Step(rank - taking_part, True, False), Step(rank - taking_part, False, True)]
    found = [Step(rank ^ (1 << bit), True, True) for bit in range(taking_part.bit_length() - 1)]
    beyond = rank + taking_part
    if beyond < world_size:
        found = [Step(beyond, False, True), *found, Step(beyond, True, False)]
    return found


@dataclass
class Traffic:
    """Bytes and collectives that this rank has sent since it was created.

    All-reduces are those of shards, between groups of ranks that hold a copy each.
    """

    reduce_scatters: int = 0
    reduce_scatter_bytes: int = 0
    all_gathers: int = 0
    all_gather_bytes: int = 0
    small_reductions: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    # Not compared: two traffics are equal where the same was sent, however long it took.
    waited_seconds: float = field(default=0.0, compare=False)
    """How long this host has waited: on CPU the communication that nothing hid. On a GPU, streams wait instead."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(operator.add, vars(self).values(), vars(other).values()))


class Collectives(ABC):
    """What the engine asks of a process group. Every method is collective and returns before the transfer is done.

    All ranks must launch the same operations in the same order. Until the returned :class:`Work` has been waited for,
    the tensors must be neither touched nor freed.

    Args:
        group: The process group.
        groups: Which of its ranks share a copy of what is sharded; by default all do.

    Attributes:
        shard_groups: Which ranks share a copy of what is sharded.
        place: Which shard of which copy is this rank's.
        mates: The ranks that share a copy with this one, in the order of their shards.
        shard_count: How many they are.
        widens: Whether equal shards of gradients travel in the dtype in which they are summed.
        sends_nothing: Whether a sum is what this rank gives, and a gather what it has.
    """

    widens = False
    sends_nothing = False

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.shard_groups = groups or ShardGroups.of_all(self.world_size)
        self.place = self.shard_groups.place(self.rank)
        self.mates = self.shard_groups.mates(self.rank)
        self.shard_count = len(self.mates)
        # Weak, so that torch alone keeps the group alive: see `process_groups.py`.
        self._group = weakref.ref(group)
        self.traffic = Traffic()
        self._counting = threading.Lock()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: It has been destroyed.
        """
        found = self._group()
        if found is None:
            raise RuntimeError("The process group that this training communicated by has been destroyed.")
        return found

    def reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Sums ``buffer`` over all ranks and leaves this rank's shard of the sum in ``shard``.

        Args:
            buffer: 1-D, contiguous. Its content is undefined afterwards.
            shard: 1-D, as long as this rank's part; written once the returned work has been waited for. Where its dtype
                is wider than the buffer's, sums between CPUs are made in it.
            bounds: Shard s is ``buffer[bounds[s]:bounds[s + 1]]``; by default all are equal.

        Returns:
            The work.
        """
        self.traffic.reduce_scatters += self.shard_count > 1
        return self._reduce_scatter(buffer, shard, self._bounds(buffer, bounds))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Completes ``buffer``, of which each rank has written its own shard, in place on every rank.

        Args:
            buffer: 1-D, contiguous.
            bounds: Shard s is ``buffer[bounds[s]:bounds[s + 1]]``; by default all are equal.

        Returns:
            The work.
        """
        self.traffic.all_gathers += self.shard_count > 1
        return self._all_gather(buffer, self._bounds(buffer, bounds))

    def connect(self, device: torch.device, reduces: bool = True) -> None:
        """Connects this rank with those that it will exchange equal chunks with. Collective; a byte or so to each.

        Else they would be connected at their first message, within a backward. A rank that waits there for one that has
        ended waits for five timeouts; the end of a connection is noticed at once.

        Args:
            device: Of what will be sent.
            reduces: Whether that will be summed up, or only gathered.
        """
        counted = vars(self.traffic).copy()
        # Several elements a shard: each that holds it sends the others one.
        buffer = torch.zeros(self.world_size, device=device)
        bounds = self._bounds(buffer, None)
        # Of a copy that all share, both connect the same ranks.
        if reduces or self.place.copies == 1:
            self._reduce_scatter(buffer, buffer.new_empty(self.place.copies), bounds).wait()
        else:
            self._all_gather(buffer, bounds).wait()
        vars(self.traffic).update(counted)

    def count(self, counter: str, sent: int) -> None:
        """Adds to a counter of ``traffic`` what this rank sends; any thread may."""
        # One may launch the second level of an exchange while the main thread launches the first of the next.
        with self._counting:
            setattr(self.traffic, counter, getattr(self.traffic, counter) + sent)

    def wait(self, work: Work) -> None:
        """Waits, and adds the time to ``traffic.waited_seconds``."""
        began = time.perf_counter()
        work.wait()
        self.traffic.waited_seconds += time.perf_counter() - began

    def _bounds(self, buffer: Tensor, bounds: Sequence[int] | None) -> Sequence[int]:
        return range(0, buffer.numel() + 1, buffer.numel() // self.shard_count) if bounds is None else bounds

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Combines a small tensor over all ranks, in place. For norms and flags, never for gradients.

        What lies on the host goes by recursive doubling. The first message is sent now, the others by whoever waits.
        """
        if self.world_size == 1:
            return DONE
        self.count_small_reduction()
        if tensor.device.type == "cpu":
            return Exchange(self._reduce_on_host(tensor, _COMBINE[op]))
        how = dist.AllreduceOptions()
        how.reduceOp, how.asyncOp = dist.ReduceOp(op), True
        # What `dist.all_reduce` comes to, after six times as many calls of Python.
        return as_work(self.group.allreduce([tensor], how))

    def _reduce_on_host(self, tensor: Tensor, combine: Combine) -> Steps:
        tensor.copy_((yield from self._doubling(tensor, combine, Tag.SMALL_REDUCTION)))

    def combine(self, own: Tensor, combine: Combine, tag: int, threads: ExchangeThreads | None = None) -> Exchange:
        """Combines messages on the host over all ranks; the result is the same on all, to the last bit.

        The first message is sent now, the others by whoever waits, or by threads from now on.

        Args:
            own: This rank's message: contiguous, and as long as everybody's. It must not be changed until the exchange
                has ended.
            combine: Makes one message of two.
            tag: All exchanges of one tag are made by all ranks in the same order.
            threads: See the exchange through.
        """
        exchange = Exchange(self._doubling(own, combine, tag), threads)
        exchange.hand_over()
        return exchange

    def _doubling(self, message: Tensor, combine: Combine, tag: int) -> Steps:
        for peer, sends, receives in doubling_steps(self.rank, self.world_size):
            received = torch.empty_like(message)
            messages = [Message(False, received, peer)] * receives + [Message(True, message, peer)] * sends
            yield launch(self.group, messages, tag, message, received)
            if receives and not sends and peer < self.rank:
                # The answer, which this rank's message is already in.
                message = received
            elif receives:
                # In the order of ranks, so that both come to the same bits.
                message = combine(message, received) if self.rank < peer else combine(received, message)
        return message

    def count_small_reduction(self) -> None:
        """Takes note of a small message that all ranks send, and put together."""
        if self.world_size > 1:
            self.traffic.small_reductions += 1
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
    """How many small reductions this rank has launched by the group: where all are, the same on all."""
    return _SMALL_REDUCTIONS.get(group, 0)


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, or its components if it is complex: not all backends take complex tensors, and sums are the same."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


Counter = Literal["reduce_scatter_bytes", "all_gather_bytes", "all_reduce_bytes"]
"""Of what is sent, in ``traffic``."""

Chunks = Callable[[int], Sequence[Tensor]]
"""The chunks that go to a rank, or come from it; both sides list the same ones in the same order."""

Tags = Iterator[int]
"""Those of one exchange, a new one for each of its steps: another thread launches each step."""

Schedule = Sequence[tuple[int, int]]
"""To whom a rank sends and from whom it receives, step by step; found once, not for each bucket."""

_SUMMED_BY_WAITER = 2**19
"""Bytes of a buffer that is summed in some 50 microseconds: less than it takes a thread to wake up for it."""


class _Held(NamedTuple):
    """What a rank has of a buffer: its elements from ``start`` on, in ``memory``."""

    memory: Tensor
    start: int

    def part(self, start: int, stop: int) -> Tensor:
        return self.memory[start - self.start : stop - self.start]


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its chunk; each chunk travels once.

    Rank r sends to r + 1, r + 2, ... in turn, so that no rank is everyone's first target. The number of messages
    grows with the square of the world size, so this is for few ranks.

    Groups of ranks may hold a copy of the optimizer state each. Then sums are made over the ranks of a group, and those
    over the ranks that hold the same shard, one of every group: with K groups of G ranks, a rank sends (G - 1) / G of a
    bucket within its group, and 2 (K - 1) / K of a shard to others. The second sum ends with the same bits on all of
    its ranks: copies of a state that began alike stay so. An all-gather stays within the group.
    """

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None) -> None:
        super().__init__(group, groups)
        self._threads = ExchangeThreads("exchange of chunks")
        self._has_several_steps = self.place.copies > 1
        self._holders = self.shard_groups.holders(self.rank)
        self._with_mates, self._with_holders = map(self._schedule, (self.mates, self._holders))

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        has_several_steps = self._has_several_steps or not isinstance(bounds, range)
        exchange = Exchange(self._sum(buffer, shard, bounds), self._threads)
        # By threads: the sum is made as soon as the chunks have arrived, while this one computes the rest of backward.
        if has_several_steps or buffer.nbytes > _SUMMED_BY_WAITER:
            exchange.hand_over()
        return exchange

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        exchange = Exchange(self._gather(buffer, bounds), self._threads)
        if self._has_several_steps or not isinstance(bounds, range):
            exchange.hand_over()
        return exchange

    def _sum(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Steps:
        tags = count(Tag.EXCHANGE)
        if isinstance(bounds, range):
            # The very generator: one around it would keep the buffer for longer.
            return self._sum_evenly(buffer, shard, bounds, tags)
        return self._sum_for_owners(buffer, shard, bounds, tags)

    def _sum_for_owners(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int], tags: Tags) -> Steps:
        equal = even_bounds(buffer.numel(), self.shard_count)
        sums = shard.new_empty(equal.step)
        yield from self._sum_evenly(buffer, sums, equal, tags)
        del buffer
        held, own = _Held(sums, equal[self.place.shard]), _Held(shard, bounds[self.place.shard])
        yield self._pass_on(held, equal, own, bounds, "reduce_scatter_bytes", next(tags))

    def _gather(self, buffer: Tensor, bounds: Sequence[int]) -> Steps:
        tags = count(Tag.EXCHANGE)
        if isinstance(bounds, range):
            yield from self._gather_evenly(buffer, bounds, tags)
            return
        equal, whole = even_bounds(buffer.numel(), self.shard_count), _Held(buffer, 0)
        yield self._pass_on(whole, bounds, whole, equal, "all_gather_bytes", next(tags))
        yield from self._gather_evenly(buffer, equal, tags)

    def _sum_evenly(self, buffer: Tensor, shard: Tensor, bounds: range, tags: Tags) -> Steps:
        parts = {mate: [chunk] for mate, chunk in zip(self.mates, split(buffer, bounds), strict=True)}
        (of_mates,) = yield from self._swap(self._with_mates, parts, "reduce_scatter_bytes", next(tags))
        sum_in_order(of_mates, shard)
        if self.place.copies > 1:
            del buffer, parts, of_mates
            yield from self._sum_between_groups(shard, tags)

    def _sum_between_groups(self, shard: Tensor, tags: Tags) -> Steps:
        """Each holder sums one piece, and sends the sum to all others, so that all have the same bits."""
        self.count("all_reduces", 1)
        bounds = piece_bounds(shard.numel(), len(self._holders))
        pieces = {holder: [piece] for holder, piece in zip(self._holders, split(shard, bounds), strict=True)}
        (of_holders,) = yield from self._swap(self._with_holders, pieces, "all_reduce_bytes", next(tags))
        (own,) = pieces[self.rank]
        total = torch.empty_like(own)
        sum_in_order(of_holders, total)
        own.copy_(total)
        yield self._exchange(self._with_holders, lambda _: [own], pieces.__getitem__, "all_reduce_bytes", next(tags))

    def _gather_evenly(self, buffer: Tensor, bounds: range, tags: Tags) -> Steps:
        chunks = dict(zip(self.mates, split(buffer, bounds), strict=True))
        yield self._exchange(
            self._with_mates, lambda _: [chunks[self.rank]], lambda mate: [chunks[mate]], "all_gather_bytes", next(tags)
        )

    def _pass_on(
        self, source: _Held, had: Sequence[int], target: _Held, wanted: Sequence[int], counted_as: Counter, tag: int
    ) -> Work:
        """Sends what this rank has to those who want it, and receives what it wants from those who have it.

        Args:
            source: Holds this rank's part by the bounds ``had``.
            had: Who has what.
            target: Gets this rank's part by the bounds ``wanted``.
            wanted: Who wants what.
            counted_as: See :meth:`_exchange`.
            tag: See :meth:`_exchange`.
        """
        shard, sent = self.place.shard, 0
        messages = []
        for part in parts_of(had, wanted[shard], wanted[shard + 1]):
            place = target.part(part.start, part.stop)
            if part.shard != shard:
                messages.append(Message(False, real_view(place), self.mates[part.shard]))
            elif source.memory is not target.memory:
                place.copy_(source.part(part.start, part.stop))
        for part in parts_of(wanted, had[shard], had[shard + 1]):
            if part.shard != shard:
                leaving = source.part(part.start, part.stop)
                sent += leaving.nbytes
                messages.append(Message(True, real_view(leaving), self.mates[part.shard]))
        messages.sort(key=attrgetter("peer"))
        self.count(counted_as, sent)
        return launch(self.group, messages, tag, source.memory, target.memory)

    def _swap(
        self, schedule: Schedule, parts: Mapping[int, Sequence[Tensor]], counted_as: Counter, tag: int
    ) -> Generator[Work, None, list[tuple[Tensor, ...]]]:
        """Sends every rank of a schedule its parts, and receives this rank's.

        Args:
            schedule: Of the ranks.
            parts: Those of each rank, this one among them, in the order in which sums are made.
            counted_as: See :meth:`_exchange`.
            tag: See :meth:`_exchange`.

        Returns:
            For each of this rank's parts, those that all ranks had.
        """
        own = parts[self.rank]
        arriving = {rank: own if rank == self.rank else _like(own, part) for rank, part in parts.items()}
        yield self._exchange(schedule, parts.__getitem__, arriving.__getitem__, counted_as, tag)
        return list(zip(*arriving.values(), strict=True))

    def _schedule(self, ranks: Sequence[int]) -> Schedule:
        """In which order this rank, one of ``ranks``, exchanges chunks with the others."""
        index, size = ranks.index(self.rank), len(ranks)
        return [(ranks[(index + step) % size], ranks[(index - step) % size]) for step in range(1, size)]

    def _exchange(self, schedule: Schedule, outgoing: Chunks, incoming: Chunks, counted_as: Counter, tag: int) -> Work:
        """Sends every other rank of a schedule its chunks, and receives from it; empty ones are not sent.

        Args:
            schedule: Of the ranks that exchange.
            outgoing: What goes to a rank. It must be kept until the work has been waited for.
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
        # Two ranks that exchange nothing else may be connected by these: first those with higher ranks.
        messages.sort(key=lambda message: message.sends != (message.peer > self.rank))
        self.count(counted_as, sent)
        return launch(self.group, messages, tag)


class TwoLevelCollectives(PairwiseCollectives):
    """Exchanges within nodes, then between counterparts: the ranks with the same index on their nodes.

    Needs a topology that has two levels. In a reduce-scatter each rank first sums, over its node, what belongs to its
    counterparts and itself, then sends each counterpart one such sum. So with K nodes a node sends (K - 1) / K of a
    bucket per phase, whatever its number of ranks R, where flat exchange sends R times as much and a ring all-reduce up
    to 2 (N - 1) / N in both phases together; every rank of the node sends the same share of it. An all-gather goes the
    same way backward.

    Besides its bucket, a reduce-scatter holds (R - 1) / R of it for what it receives, then one chunk per other node.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        super().__init__(group)
        self._has_several_steps = True
        node_mates = topology.node_mates(self.rank)
        self._counterparts = topology.counterparts(self.rank)
        self._columns = {mate: topology.counterparts(mate) for mate in node_mates}
        self._within, self._between = map(self._schedule, (node_mates, self._counterparts))

    @override
    def _sum_evenly(self, buffer: Tensor, shard: Tensor, bounds: range, tags: Tags) -> Steps:
        chunks = split(buffer, bounds)
        parts = {mate: [chunks[rank] for rank in column] for mate, column in self._columns.items()}
        by_counterpart = yield from self._swap(self._within, parts, "reduce_scatter_bytes", next(tags))
        sums: dict[int, Sequence[Tensor]] = {}
        for rank, of_mates in zip(self._counterparts, by_counterpart, strict=True):
            narrow = of_mates[0].dtype
            total = of_mates[0] if shard.dtype == narrow else torch.empty_like(of_mates[0], dtype=shard.dtype)
            sum_in_order(of_mates, total)
            # What is sent is narrow. This rank's own sum stays wide until the final addition.
            sums[rank] = [total if rank == self.rank else total.to(narrow)]
        del buffer, chunks, parts, by_counterpart, of_mates
        (of_nodes,) = yield from self._swap(self._between, sums, "reduce_scatter_bytes", next(tags))
        sum_in_order(of_nodes, shard)

    @override
    def _gather_evenly(self, buffer: Tensor, bounds: range, tags: Tags) -> Steps:
        chunks = split(buffer, bounds)
        yield self._exchange(
            self._between, lambda _: [chunks[self.rank]], lambda peer: [chunks[peer]], "all_gather_bytes", next(tags)
        )
        yield self._exchange(
            self._within,
            lambda _: [chunks[rank] for rank in self._counterparts],
            lambda mate: [chunks[rank] for rank in self._columns[mate]],
            "all_gather_bytes",
            next(tags),
        )


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
