"""Transfers in flight: messages, exchanges that threads complete, a GPU's streams, and names for a trace.

An exchange is a generator. It launches messages and yields the work that it waits for before it continues. The thread
that waits for the exchange runs it, or separate threads do.
"""

import queue
import threading
import time
import weakref
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_parstrat.distributed.torch_compat import profiler_is_enabled

_UNMARKED: AbstractContextManager[object] = nullcontext()


def marked(name: str) -> AbstractContextManager[object]:
    """Within it, a trace of ``torch.profiler`` shows ``name``. Not collective.

    Names begin with ``zero1_custom:``. If several strategies do the same, they begin with ``lightning_parstrat:``. A
    name contains what is launched, waited for, agreed on or stepped. ``record_function`` alone takes some 7
    microseconds without a trace, and a step has several marks per bucket. Checking first takes a tenth of one.
    """
    return record_function(name) if profiler_is_enabled() else _UNMARKED


class _Waits(threading.local):
    """How long a thread has waited for other ranks, and whether it waits now."""

    seconds = 0.0
    is_waiting = False


_WAITS = _Waits()


@contextmanager
def waiting() -> Iterator[None]:
    """Within it, this thread waits for other ranks: see :func:`waited_seconds`. Not collective."""
    if _WAITS.is_waiting:
        yield
        return
    _WAITS.is_waiting, began = True, time.perf_counter()
    try:
        yield
    finally:
        _WAITS.is_waiting = False
        _WAITS.seconds += time.perf_counter() - began


def waited_seconds() -> float:
    """How long this thread has waited for other ranks so far: on CPU, communication that nothing hid.

    On a GPU, streams wait instead.
    """
    return _WAITS.seconds


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Blocks this thread (on CUDA, the current stream) until the result may be read. You may call it again."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. If a backend cannot tell, False."""


class Transfers:
    """Several transfers that are waited for as one. It keeps the memory that they use alive."""

    def __init__(self, transfers: Sequence[Work], *memory: Tensor) -> None:
        self._transfers: Sequence[Work] = transfers
        self._memory: tuple[Tensor, ...] = memory

    def wait(self) -> None:
        """Blocks until all are done. If one has failed, raises the backend's error."""
        for transfer in self._transfers:
            transfer.wait()
        # This object may be held for longer than the buffers should live.
        self._transfers, self._memory = (), ()

    def is_completed(self) -> bool:
        """Whether all are done, as far as the backend can tell."""
        return all(transfer.is_completed() for transfer in self._transfers)


DONE: Work = Transfers(())
"""A collective that has nothing to do."""

_SET_ASIDE: list[Work] = []


def set_aside(works: Iterable[Work]) -> None:
    """Keeps transfers of a training that has failed, for which nothing will wait. Not collective.

    A work keeps its buffers, which must outlive the transfers. Its receives must stay posted. Otherwise the next
    training on these process groups would receive this one's messages.
    """
    _SET_ASIDE[:] = [work for work in _SET_ASIDE if not work.is_completed()]
    _SET_ASIDE.extend(works)


class Message(NamedTuple):
    """A contiguous tensor on the host that is sent to another rank, or received from it."""

    sends: bool
    tensor: Tensor
    peer: int


def launch(group: dist.ProcessGroup, messages: Sequence[Message], tag: int) -> Work:
    """Begins to send and to receive.

    If two ranks have exchanged nothing yet, one may wait here until the other launches a message between them. So
    messages must be in an order in which no ranks wait for each other in a circle. The order of the ranks is an
    example.

    Args:
        group: Works on host memory.
        messages: Do not change or free them before they have been waited for.
        tag: Messages of one tag between two ranks arrive in the order in which both launch them. So one thread launches
            all messages of a tag.
    """
    # This does the same as `dist.isend` and `dist.irecv`, with a tenth of the calls of Python.
    works = [(group.send if sends else group.recv)([tensor], peer, tag) for sends, tensor, peer in messages]
    return Transfers(works, *(message.tensor for message in messages))


Steps = Generator[Work, None, Any]
"""Each step launches transfers and yields what the next step waits for. The last one returns the result."""


class Exchange:
    """Steps that follow each other. The first one is launched at once.

    Args:
        steps: The steps.
        threads: Complete the steps from :meth:`hand_over` on. None leaves them to the thread that waits.
    """

    def __init__(self, steps: Steps, threads: "ExchangeThreads | None" = None) -> None:
        self._steps = steps
        self._threads = threads
        self._result: Any = None
        self._error: Exception | None = None
        # Held until threads have ended the exchange. An `Event` takes ten times as long, in every step.
        self._running: threading.Lock | None = None
        self.in_flight: Work = DONE
        """The work that is waited for next."""
        self.has_ended = False
        """Whether nothing is left to do, as all is done or something has failed."""
        self.go_on()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """Waits for what was launched last, and takes the next step. The thread that waits gets its error."""
        try:
            self.in_flight.wait()
            self.in_flight = next(self._steps)
        except StopIteration as ended:
            self.in_flight, self._result, self.has_ended = DONE, ended.value, True
        except Exception as error:
            # The work in flight stays: its memory must outlive it.
            self._error, self.has_ended = error, True
        if self.has_ended and self._running is not None:
            self._running.release()

    def hand_over(self) -> None:
        """Lets threads complete the exchange, and free its memory, before a call of :meth:`wait`."""
        if self._threads is not None and self._running is None and not self.has_ended:
            self._running = threading.Lock()
            self._running.acquire()
            self._threads.see_through(self)

    def wait(self) -> Any:
        """Blocks until all steps are done.

        Returns:
            The result, in every call.

        Raises:
            RuntimeError: A step failed, for instance because another rank has ended. Raised in every call.
        """
        with waiting():
            if self._running is not None:
                with self._running:
                    pass
            while not self.has_ended:
                self.go_on()
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks failed: {self._error}") from self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. This call lets threads, if any, complete the exchange.

        Without threads, :meth:`wait` would return at once if this step is the last that waits. A backend may not know.
        """
        self.hand_over()
        if self._running is not None:
            return not self._running.locked()
        return self._error is not None or self.in_flight.is_completed()


class ExchangeThreads:
    """Threads that complete exchanges, in the order in which they were handed over, while this object lives.

    The n-th thread waits for the n-th step of each exchange and takes the next one. So an exchange that waits for a
    slow network between nodes does not delay exchanges within nodes. One thread launches the n-th messages of all
    exchanges. A thread starts when it first has something to do.

    Args:
        name: The threads' name, shown by debuggers and profilers.
        most: The most threads. The last one completes exchanges to their end.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        # The thread refers to its stage alone: a reference to this object would keep both alive for ever.
        self._first = _Stage(name, 0, most)
        weakref.finalize(self, self._first.put, None)

    def see_through(self, exchange: Exchange) -> None:
        """Takes the steps of an exchange that has begun."""
        self._first.put(exchange)


class _Stage:
    """One of the threads, and what waits for it."""

    def __init__(self, name: str, number: int, most: int | None) -> None:
        self._name, self._number, self._most = name, number, most
        # Its `put` is reentrant: a garbage collection may call it.
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._has_thread = False
        self._next: _Stage | None = None

    def put(self, exchange: Exchange | None) -> None:
        """Hands over an exchange, or ends the thread. Only one thread hands over."""
        if exchange is not None and not self._has_thread:
            self._has_thread = True
            # A daemon: an exchange with a rank that has ended must not keep this process alive.
            threading.Thread(target=self._run, name=f"{self._name} {self._number}", daemon=True).start()
        self._queue.put(exchange)

    # Grad mode belongs to a thread, and a new one records gradients.
    @torch.no_grad()
    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            exchange.go_on()
            while self._number + 1 == self._most and not exchange.has_ended:
                exchange.go_on()
            if not exchange.has_ended:
                self._next = self._next or _Stage(self._name, self._number + 1, self._most)
                self._next.put(exchange)
            # While the thread waits for its next exchange, its variables must not keep the buffers of the last alive.
            del exchange
        if self._next is not None:
            self._next.put(None)


class Streams:
    """The streams of a device. A CPU's do nothing: the order of work is that of the program.

    torch starts a collective after the work that the launching stream has queued. It keeps the collective's buffers
    until a wait. One part is left to do here. A stream that waits later must run after the collective, without a wait
    on the host.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._module = torch.get_device_module(self._device)
        self.are_several = self._device.type != "cpu"
        """Whether there may be work on more than one stream."""

    def current(self) -> Any:
        """The stream on which work is queued now."""
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, ``stream`` is the current one."""
        return cast(AbstractContextManager[object], self._module.stream(stream))

    def another(self) -> Any:
        """A stream beside all others."""
        return self._module.Stream(self._device)

    def wait_for(self, stream: Any) -> None:
        """Makes the current stream wait for the work that ``stream`` has queued so far."""
        self.current().wait_stream(stream)


class Arrivals:
    """The streams on which gradients became ready, if not on the one that reductions are launched from.

    Autograd runs the last part of a gradient on the stream on which its parameter was first used. For a captured graph,
    that is the stream of the capture. Backward's own stream comes after it when backward has ended, not before.

    Args:
        streams: Streams of the gradients' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._launching = streams.current()
        self._others: dict[Hashable, set[Any]] = {}

    def begin(self) -> None:
        """From now on, reductions are launched from the current stream."""
        self._launching = self._streams.current()

    def note(self, bucket: Hashable) -> None:
        """Notes that a gradient of the bucket became ready on the current stream."""
        current = self._streams.current()
        if current != self._launching:
            self._others.setdefault(bucket, set()).add(current)

    def forget(self, bucket: Hashable) -> None:
        """Drops the notes of a bucket whose gradients are not reduced, or no longer exist."""
        self._others.pop(bucket, None)

    @contextmanager
    def waited_for(self, bucket: Hashable) -> Iterator[None]:
        """Within it, the current stream is the launching one, which waits for all gradients of the bucket.

        The gradients' streams wait for it in turn. So memory that is freed within it is written again only after it was
        read.
        """
        # The current stream may have made some of them without a hook: gradients that are left over.
        others = {*self._others.pop(bucket, ()), self._streams.current()} - {self._launching}
        with self._streams.on(self._launching):
            for stream in others:
                self._streams.wait_for(stream)
            yield
        for stream in others:
            with self._streams.on(stream):
                self._streams.wait_for(self._launching)
