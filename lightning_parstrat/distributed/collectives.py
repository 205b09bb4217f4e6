"""Reduce-scatter and all-gather of flat buckets, launched asynchronously: one interface, three ways to do it.

``NativeCollectives`` calls torch's own (NCCL, and Gloo in tests). ``PairwiseCollectives`` exchanges pieces between
every two ranks and sums locally, because Gloo's reduce-scatter is an all-reduce in disguise: it sends about twice the
bytes. ``LocalCollectives`` is world size 1, where a reduce-scatter is the identity and a gather nothing.
"""

import atexit
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
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


_PROCESS_GROUPS: dict[timedelta | None, tuple[object, ProcessGroups]] = {}


def process_groups(timeout: timedelta | None = None) -> ProcessGroups:
    """The three process groups over all ranks, made on first use and shared by all later uses in this process.

    Collective: the first call with a given default group and timeout must be made by all ranks.

    Args:
        timeout: How long a collective may take before it raises; None leaves the backend's default.
    """
    _let_worker_threads_finish_at_exit()
    world = dist.group.WORLD
    if timeout not in _PROCESS_GROUPS or _PROCESS_GROUPS[timeout][0] is not world:
        groups = ProcessGroups(
            gradients=dist.new_group(timeout=timeout),
            parameters=dist.new_group(timeout=timeout),
            control=dist.new_group(timeout=timeout, backend="gloo"),
        )
        _PROCESS_GROUPS[timeout] = (world, groups)
    return _PROCESS_GROUPS[timeout][1]


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
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.traffic = Traffic()

    def reduce_scatter(self, buffer: Tensor, shard: Tensor) -> Work:
        """Sums ``buffer`` over all ranks and leaves this rank's part of the sum in ``shard``.

        Args:
            buffer: 1-D, ``world_size * shard.numel()`` elements, contiguous. Its content is undefined afterwards.
            shard: 1-D, same dtype; written once the returned work has been waited for.

        Returns:
            The work. Each rank sends ``(world_size - 1) * shard.nbytes`` bytes.
        """
        self.traffic.reduce_scatters += self.world_size > 1
        self.traffic.reduce_scatter_bytes += (self.world_size - 1) * shard.nbytes
        return self._reduce_scatter(buffer, shard)

    def all_gather(self, buffer: Tensor) -> Work:
        """Completes ``buffer``, of which each rank has written its own shard, in place on every rank.

        Args:
            buffer: 1-D, a multiple of ``world_size`` elements, contiguous; rank r's shard is the r-th part.

        Returns:
            The work. Each rank sends ``(world_size - 1) / world_size * buffer.nbytes`` bytes.
        """
        self.traffic.all_gathers += self.world_size > 1
        self.traffic.all_gather_bytes += (self.world_size - 1) * (buffer.nbytes // self.world_size)
        return self._all_gather(buffer)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Combines a small tensor over all ranks, in place: for norms and flags, never for gradients."""
        if self.world_size == 1:
            return _DONE
        self.traffic.small_reductions += 1
        return _as_work(dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor) -> Work: ...

    @abstractmethod
    def _all_gather(self, buffer: Tensor) -> Work: ...


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
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor) -> Work:
        shard.copy_(buffer)
        return _DONE

    @override
    def _all_gather(self, buffer: Tensor) -> Work:
        return _DONE


class NativeCollectives(Collectives):
    """torch's own collectives, as NCCL wants them; on Gloo the same code, slower."""

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor) -> Work:
        return _as_work(_reduce_scatter_single(_real(shard), _real(buffer), group=self.group, async_op=True))

    @override
    def _all_gather(self, buffer: Tensor) -> Work:
        whole = _real(buffer)
        own = whole.view(self.world_size, -1)[self.rank]
        return _as_work(_all_gather_single(whole, own, group=self.group, async_op=True))


class PairwiseCollectives(Collectives):
    """Every rank sends every other rank its piece; each piece travels once.

    Rank r talks to r + 1, r + 2, ... in turn, so that no rank is everyone's first partner. The number of messages
    grows with the square of the world size, so this is for the tens of ranks that train on CPUs.
    """

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor) -> Work:
        pieces = buffer.view(self.world_size, -1)
        received = torch.empty(self.world_size - 1, shard.numel(), dtype=buffer.dtype, device=buffer.device)
        transfers = []
        for step in range(1, self.world_size):
            target, source = self._partners(step)
            transfers.append(self._receive(received[step - 1], source))
            transfers.append(self._send(pieces[target], target))
        return _PairwiseReduction(transfers, pieces, received, shard, self.rank)

    @override
    def _all_gather(self, buffer: Tensor) -> Work:
        pieces = buffer.view(self.world_size, -1)
        transfers = []
        for step in range(1, self.world_size):
            target, source = self._partners(step)
            transfers.append(self._receive(pieces[source], source))
            transfers.append(self._send(pieces[self.rank], target))
        return _Transfers(transfers, buffer)

    def _partners(self, step: int) -> tuple[int, int]:
        """Whom this rank sends to, and receives from, in the given step of the rotation."""
        return (self.rank + step) % self.world_size, (self.rank - step) % self.world_size

    def _send(self, piece: Tensor, target: int) -> Work:
        return _as_work(dist.isend(_real(piece), group=self.group, group_dst=target))

    def _receive(self, piece: Tensor, source: int) -> Work:
        return _as_work(dist.irecv(_real(piece), group=self.group, group_src=source))


class _Transfers:
    """Several transfers waited for as one; keeps the memory they use alive."""

    def __init__(self, transfers: Sequence[Work], *memory: Tensor) -> None:
        self._transfers = transfers
        self._memory: tuple[Tensor, ...] = memory

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()
        self._transfers, self._memory = (), ()


class _PairwiseReduction:
    """The pieces that arrive are summed in rank order, so that the result does not depend on who owns it."""

    def __init__(self, transfers: Sequence[Work], pieces: Tensor, received: Tensor, shard: Tensor, rank: int) -> None:
        self._transfers = _Transfers(transfers)
        self._pieces: Tensor | None = pieces
        self._received: Tensor | None = received
        self._shard = shard
        self._rank = rank

    def wait(self) -> None:
        if self._pieces is None or self._received is None:
            return
        self._transfers.wait()
        world_size = self._pieces.shape[0]
        by_rank = [
            self._pieces[rank] if rank == self._rank else self._received[(self._rank - rank) % world_size - 1]
            for rank in range(world_size)
        ]
        torch.add(by_rank[0], by_rank[1], out=self._shard)
        for piece in by_rank[2:]:
            self._shard.add_(piece)
        self._pieces = self._received = None


class _Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Returns at once."""


_DONE = _Done()

# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _real(tensor: Tensor) -> Tensor:
    """Backends know no complex numbers; sums and copies of the real components are those of the complex ones."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _as_work(work: Work | None) -> Work:
    if work is None:
        raise AssertionError("torch returned no handle for an asynchronous collective: this rank is not in the group")
    return work
