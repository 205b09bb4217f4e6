"""Ranks on one machine that send as over a network of a known latency and rate, without a network or root.

Each process has one interface: what it sends leaves one after the other, takes its time per byte, and arrives a latency
later. Messages between ranks are Gloo's own, only later. DDP's sums go around a ring of such messages, as Gloo's would.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RING_TAG = 99


class Interface:
    """What a process sends by.

    Args:
        latency_seconds: From when a message has left to when it arrives.
        seconds_per_byte: In which nothing else leaves.
    """

    def __init__(self, latency_seconds: float, seconds_per_byte: float) -> None:
        self._latency_seconds, self._seconds_per_byte = latency_seconds, seconds_per_byte
        self._messages: queue.SimpleQueue[tuple[float, int, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name="paced wire", daemon=True).start()

    def send(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Has ``deliver`` called when a message of so many bytes has arrived."""
        self._messages.put((time.perf_counter(), nbytes, deliver))

    def _carry(self) -> None:
        free = 0.0
        while True:
            asked_at, nbytes, deliver = self._messages.get()
            free = max(free, asked_at) + nbytes * self._seconds_per_byte
            time.sleep(max(0.0, free + self._latency_seconds - time.perf_counter()))
            deliver()
            # While this thread waits for the next message, it must not keep the last one's memory alive.
            del deliver


class _Sent(dist.Work):
    """A message that leaves when the interface has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self._left = threading.Event()
        self._work: Any = None

    def leave(self, work: Any) -> None:
        self._work = work
        self._left.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._left.wait()
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        """Whether the message has left."""
        return self._left.is_set() and bool(self._work.is_completed())


class PacedGroup(dist.ProcessGroup):
    """A group of Gloo's whose messages and sums of floating-point numbers go by an interface; all else is Gloo's.

    Args:
        real: Gloo's group.
        interface: The process's.
    """

    def __init__(self, real: Any, interface: Interface) -> None:
        super().__init__(real.rank(), real.size())
        self._real, self._interface = real, interface
        self._sums: queue.SimpleQueue[tuple[list[Tensor], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._sum_up, name="paced sums", daemon=True).start()

    @property
    def group_name(self) -> str:
        """torch looks groups up by it."""
        return f"paced {id(self)}"

    def getBackendName(self) -> str:
        """For torch's messages."""
        return "paced"

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Sent:
        """A message leaves in its turn."""
        sent = _Sent()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._interface.send(nbytes, lambda: sent.leave(self._real.send(tensors, peer, tag)))
        return sent

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Gradients go around the ring; flags and extremes are Gloo's own."""
        if not tensors[0].is_floating_point() or (opts is not None and opts.reduceOp != dist.ReduceOp.SUM):
            return self._real.allreduce(tensors, *([] if opts is None else [opts]))
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._sums.put((tensors, future))
        return torch._C._distributed_c10d._create_work_from_future(future)

    @torch.no_grad()
    def _sum_up(self) -> None:
        while True:
            tensors, future = self._sums.get()
            for tensor in tensors:
                self.go_around(tensor)
            future.set_result(tensors)
            del tensors, tensor, future

    def go_around(self, tensor: Tensor) -> None:
        """Sums a tensor up over all ranks, in place: N - 1 messages sum, and N - 1 hand round."""
        rank, size = self._real.rank(), self._real.size()
        chunks = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            going, coming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            arrived = torch.empty_like(coming) if step < size - 1 else coming
            # Both sides know the sizes.
            works = [self._real.recv([arrived], (rank - 1) % size, _RING_TAG)] if coming.numel() else []
            works += [self.send([going], (rank + 1) % size, _RING_TAG)] if going.numel() else []
            for work in works:
                work.wait()
            if step < size - 1:
                coming += arrived


def _passed_on(name: str) -> Callable[..., Any]:
    def called(self: PacedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._real, name)(*args, **kwargs)

    return called


_OF_GLOO = ("recv", "broadcast", "allgather", "gather", "scatter", "barrier", "monitored_barrier")
for _name in (*_OF_GLOO, "_set_sequence_number_for_group", "_get_sequence_number_for_group"):
    setattr(PacedGroup, _name, _passed_on(_name))


def paced(gloo: Any, latency_seconds: float, seconds_per_byte: float) -> type[PacedGroup]:
    """What stands in the place of ``gloo``, torch's class of groups; one interface for all of a process's."""
    interfaces: list[Interface] = []

    class Group(PacedGroup):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # In the process that has been forked: a fork copies no threads.
            interfaces[:] = interfaces or [Interface(latency_seconds, seconds_per_byte)]
            real = gloo(*args, **kwargs)
            super().__init__(real, interfaces[0])
            self.options = real.options

    return Group
