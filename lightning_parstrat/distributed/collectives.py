"""Reduce-scatter and all-gather of flat buckets, launched asynchronously: one interface, three ways to do it.

``NativeCollectives`` calls torch's own (NCCL, and Gloo in tests). ``PairwiseCollectives`` exchanges pieces between
every two ranks and sums locally, because Gloo's reduce-scatter is an all-reduce in disguise: it sends about twice the
bytes. ``LocalCollectives`` is world size 1, where a reduce-scatter is the identity and a gather nothing.
"""

import atexit
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Blocks until the result may be read: on CPU this thread, on CUDA the current stream."""


@dataclass
class Traffic:
    """Payload that this rank has sent, and the collectives it took, since it was created."""

    reduce_scatters: int = 0
    reduce_scatter_bytes: int = 0
    all_gathers: int = 0
    all_gather_bytes: int = 0
    small_reductions: int = 0


class ProcessGroups(NamedTuple):
    """Gradients, parameters and control messages each have a communicator, so that none waits behind another.

    Lightning uses the default one for its own broadcasts and reductions. ``control`` is always Gloo: what it carries
    is decided by the host, which then need not wait for a GPU.
    """

    gradients: dist.ProcessGroup
    parameters: dist.ProcessGroup
    control: dist.ProcessGroup


class _KnownGroup(NamedTuple):
    """A group made for one default group, by weak references.

    torch holds both until they are destroyed; whoever held them longer would, in a process forked from this one,
    destroy what waits for threads that are not there.
    """

    world: "weakref.ref[dist.ProcessGroup]"
    group: "weakref.ref[dist.ProcessGroup]"


_PROCESS_GROUPS: dict[tuple[str, timedelta | None], _KnownGroup] = {}


def process_groups(timeout: timedelta | None = None) -> ProcessGroups:
    """The three process groups over all ranks, made on first use and shared by all later uses in this process.

    Collective: the first call with a given default group and timeout must be made by all ranks.

    Args:
        timeout: How long a collective may take before it raises; None leaves the backend's default.
    """
    return ProcessGroups(
        gradients=_process_group("gradients", timeout),
        parameters=_process_group("parameters", timeout),
        control=control_group(timeout),
    )


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group for what the host decides, alone; see :func:`process_groups`."""
    return _process_group("control", timeout, backend="gloo")


def _process_group(name: str, timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    _let_worker_threads_finish_at_exit()
    world = dist.group.WORLD
    if world is None:
        raise AssertionError("process groups were asked for without a default group")
    known = _PROCESS_GROUPS.get((name, timeout))
    if known is not None and known.world() is world:
        existing = known.group()
        if existing is not None:
            return existing
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
    _PROCESS_GROUPS[name, timeout] = _KnownGroup(weakref.ref(world), weakref.ref(group))
    return group


@functools.cache
def _let_worker_threads_finish_at_exit() -> None:
    """Gives Gloo's worker threads a moment before the interpreter is torn down.

    A worker drops the tensors of a collective after it was waited for, and needs the GIL for that. If the interpreter
    is finalizing by then, Python ends the thread inside a C++ destructor, and the process aborts: a successful run that
    ends right after a collective would report failure (seen in one of five on a busy machine, without any sharding).
    """
    atexit.register(time.sleep, 0.05)


def world_size() -> int:
    """Number of ranks in the default process group."""
    return dist.get_world_size()


class Collectives(ABC):
    """What the engine asks of a process group. Every method is collective and returns before the transfer is done.

    All ranks must launch the same operations in the same order. Tensors handed in must not be touched, nor freed by
    anyone but the returned :class:`Work`'s holder, before it was waited for.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.traffic = Traffic()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: It has been destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("The process group that this training communicated by has been destroyed.")
        return group

    def reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Sums ``buffer`` over all ranks and leaves this rank's part of the sum in ``shard``.

        Args:
            buffer: 1-D, contiguous. Its content is undefined afterwards.
            shard: 1-D, as long as this rank's part; written once the returned work has been waited for. Where its dtype
                is wider than the buffer's, sums between CPUs are made in it.
            bounds: Rank r's part is ``buffer[bounds[r]:bounds[r + 1]]``; by default all parts are equal.

        Returns:
            The work. Each rank sends what belongs to the others.
        """
        bounds = self._bounds(buffer, bounds)
        away = buffer.numel() - (bounds[self.rank + 1] - bounds[self.rank])
        self.traffic.reduce_scatters += self.world_size > 1
        self.traffic.reduce_scatter_bytes += away * buffer.element_size()
        return self._reduce_scatter(buffer, shard, bounds)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Completes ``buffer``, of which each rank has written its own part, in place on every rank.

        Args:
            buffer: 1-D, contiguous.
            bounds: Rank r's part is ``buffer[bounds[r]:bounds[r + 1]]``; by default all parts are equal.

        Returns:
            The work. Each rank sends its own part to every other.
        """
        bounds = self._bounds(buffer, bounds)
        own = bounds[self.rank + 1] - bounds[self.rank]
        self.traffic.all_gathers += self.world_size > 1
        self.traffic.all_gather_bytes += (self.world_size - 1) * own * buffer.element_size()
        return self._all_gather(buffer, bounds)

    def _bounds(self, buffer: Tensor, bounds: Sequence[int] | None) -> Sequence[int]:
        return range(0, buffer.numel() + 1, buffer.numel() // self.world_size) if bounds is None else bounds

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Combines a small tensor over all ranks, in place: for norms and flags, never for gradients."""
        if self.world_size == 1:
            return _DONE
        self.traffic.small_reductions += 1
        return _as_work(dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work: ...

    @abstractmethod
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work: ...


def make_collectives(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """The collectives that suit the group's size, its backend and the device the tensors live on. Not collective."""
    if dist.get_world_size(group) == 1:
        return LocalCollectives(group)
    if device.type == "cpu":
        return PairwiseCollectives(group)
    return NativeCollectives(group)


class LocalCollectives(Collectives):
    """World size 1: the ordinary path, with nothing to send."""

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        shard.copy_(buffer)
        return _DONE

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return _DONE


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its piece; each piece travels once.

    Rank r talks to r + 1, r + 2, ... in turn, so that no rank is everyone's first partner. The number of messages
    grows with the square of the world size, so this is for the tens of ranks that train on CPUs, and for pieces that
    differ in length.
    """

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        pieces = _pieces(buffer, bounds)
        by_rank = [
            pieces[rank] if rank == self.rank else torch.empty_like(pieces[self.rank])
            for rank in range(self.world_size)
        ]
        transfers = self._exchange(pieces.__getitem__, by_rank.__getitem__)
        return _PairwiseReduction(_Transfers(transfers, buffer), by_rank, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        pieces = _pieces(buffer, bounds)
        return _Transfers(self._exchange(lambda target: pieces[self.rank], lambda source: pieces[source]), buffer)

    def _exchange(self, outgoing: Callable[[int], Tensor], incoming: Callable[[int], Tensor]) -> list[Work]:
        """Sends every other rank ``outgoing(rank)``, and receives ``incoming(rank)`` from it; empty ones stay home."""
        operations = []
        for step in range(1, self.world_size):
            target, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
            if incoming(source).numel():
                operations.append(self._operation(dist.irecv, incoming(source), source))
            if outgoing(target).numel():
                operations.append(self._operation(dist.isend, outgoing(target), target))
        return [_as_work(work) for work in dist.batch_isend_irecv(operations)] if operations else []

    def _operation(self, direction: Callable[..., Work | None], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, _real(piece), group=self.group, group_peer=peer)


class NativeCollectives(PairwiseCollectives):
    """torch's own collectives, as NCCL wants them, where all parts are equal; else the ranks exchange pieces."""

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        if not isinstance(bounds, range):
            return super()._reduce_scatter(buffer, shard, bounds)
        narrow = shard if shard.dtype == buffer.dtype else buffer.new_empty(shard.numel())
        work = _as_work(_reduce_scatter_single(_real(narrow), _real(buffer), group=self.group, async_op=True))
        return work if narrow is shard else _Widened(work, narrow, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if not isinstance(bounds, range):
            return super()._all_gather(buffer, bounds)
        whole = _real(buffer)
        own = whole.view(self.world_size, -1)[self.rank]
        return _as_work(_all_gather_single(whole, own, group=self.group, async_op=True))


class _Transfers:
    """Several transfers waited for as one; keeps the memory they use alive."""

    def __init__(self, transfers: Sequence[Work], *memory: Tensor) -> None:
        self._transfers: Sequence[Work] = transfers
        self._memory: tuple[Tensor, ...] = memory

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()
        self._transfers, self._memory = (), ()


class _PairwiseReduction:
    """The pieces that arrive are summed in rank order, so that the result does not depend on who owns it."""

    def __init__(self, transfers: _Transfers, by_rank: list[Tensor], shard: Tensor) -> None:
        self._transfers = transfers
        self._by_rank = by_rank
        self._shard = shard

    def wait(self) -> None:
        if not self._by_rank:
            return
        self._transfers.wait()
        first, *others = self._by_rank
        if others and self._shard.dtype == first.dtype:
            torch.add(first, others.pop(0), out=self._shard)
        else:
            self._shard.copy_(first)
        for piece in others:
            self._shard.add_(piece)
        self._by_rank = []


class _Widened:
    """A reduction whose result is copied into a wider dtype."""

    def __init__(self, work: Work, narrow: Tensor, shard: Tensor) -> None:
        self._work, self._shard = work, shard
        self._narrow: Tensor | None = narrow

    def wait(self) -> None:
        if self._narrow is None:
            return
        self._work.wait()
        self._shard.copy_(self._narrow)
        self._narrow = None


class _Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Returns at once."""


_DONE = _Done()

# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _pieces(buffer: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [buffer[start:stop] for start, stop in pairwise(bounds)]


def _real(tensor: Tensor) -> Tensor:
    """Backends know no complex numbers; sums and copies of the real components are those of the complex ones."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _as_work(work: Work | None) -> Work:
    if work is None:
        raise AssertionError("torch returned no handle for an asynchronous collective: this rank is not in the group")
    return work
