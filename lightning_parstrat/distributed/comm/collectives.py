"""Reduce-scatter and all-gather of flat buckets, launched asynchronously: what the engine asks of a process group.

How they are done is in ``backends.py`` (torch's own, and none at world size 1) and ``exchange.py`` (between CPUs).
"""

import operator
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.distributed.comm.doubling import Combine, DoublingExchange, doubling_steps
from lightning_parstrat.distributed.comm.process_groups import PointToPoint, Tag
from lightning_parstrat.distributed.comm.work import DONE, Followed, Work, as_work


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
        self.point_to_point = PointToPoint(group)
        """Carries what lies on the host from one rank to another."""
        self.doubling_steps = doubling_steps(self.rank, self.world_size)
        """The ranks with which this one exchanges small messages."""
        self._small_reductions = _SMALL_REDUCTIONS.setdefault(group, _Counter())
        self.traffic = Traffic()
        self._counting = threading.Lock()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: It has been destroyed.
        """
        return self.point_to_point.group

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
            exchange = DoublingExchange(
                self.point_to_point, self.doubling_steps, tensor, _COMBINE[op], Tag.SMALL_REDUCTION
            )
            return Followed(exchange, lambda: tensor.copy_(exchange.wait()))
        how = dist.AllreduceOptions()
        how.reduceOp, how.asyncOp = dist.ReduceOp(op), True
        # What `dist.all_reduce` comes to, after six times as many calls of Python.
        return as_work(self.group.allreduce([tensor], how))

    def count_small_reduction(self) -> None:
        """Takes note of a small message that all ranks send, and put together."""
        if self.world_size > 1:
            self.traffic.small_reductions += 1
            self._small_reductions.number += 1

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work: ...

    @abstractmethod
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work: ...


@dataclass
class _Counter:
    number: int = 0


_SMALL_REDUCTIONS: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Counter]" = weakref.WeakKeyDictionary()


_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    dist.ReduceOp.SUM: lambda values: reduce(torch.add, values),
    dist.ReduceOp.MAX: lambda values: reduce(torch.maximum, values),
}


def small_reductions_of(group: dist.ProcessGroup) -> int:
    """How many small reductions this rank has launched by the group: where all are, the same on all."""
    counter = _SMALL_REDUCTIONS.get(group)
    return 0 if counter is None else counter.number


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, or its components if it is complex: not all backends take complex tensors, and sums are the same."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
