"""What is in flight: messages, exchanges that threads see through, a GPU's streams, and names for a trace of it.

An exchange is a generator: it launches messages and yields the work that it has to wait for before it goes on. Whoever
waits for the exchange runs it, or threads do.
"""

import queue
import threading
import weakref
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from lightning_parstrat.distributed.torch_compat import profiler_is_enabled

_UNMARKED: AbstractContextManager[object] = nullcontext()


def marked(name: str) -> AbstractContextManager[object]:
    """Within it, a trace of ``torch.profiler`` shows ``name``. Not collective.

    Names begin with ``zero1_custom:``, or ``lightning_parstrat:`` for what several strategies do. They say what is
    launched, waited for, agreed on or stepped. ``record_function`` alone takes some 7 microseconds where nobody traces,
    and a step has several marks per bucket; asking first takes a tenth of one.
    """
    return record_function(name) if profiler_is_enabled() else _UNMARKED


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Blocks this thread (on CUDA, the current stream) until the result may be read. May be called again."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. Where a backend cannot tell, it says no."""


def as_work(work: Work | None) -> Work:
    """What torch returns for an asynchronous collective."""
    if work is None:
        raise AssertionError("torch returned no handle for an asynchronous collective: this rank is not in the group")
    return work


class Transfers:
    """Several transfers that are waited for as one; keeps the memory they use alive."""

    def __init__(self, transfers: Sequence[Work], *memory: Tensor) -> None:
        self._transfers: Sequence[Work] = transfers
        self._memory: tuple[Tensor, ...] = memory

    def wait(self) -> None:
        """Blocks until all are done; raises what the backend does if one has failed."""
        for transfer in self._transfers:
            transfer.wait()
        # This object may be held for longer than the buffers should live.
        self._transfers, self._memory = (), ()

    def is_completed(self) -> bool:
        """Whether all are done, as far as the backend can tell."""
        return all(transfer.is_completed() for transfer in self._transfers)


DONE: Work = Transfers(())
"""A collective that has nothing to do."""


class Message(NamedTuple):
    """A tensor that goes to another rank, or comes from it; contiguous, on the host."""

    sends: bool
    tensor: Tensor
    peer: int


def launch(group: dist.ProcessGroup, messages: Sequence[Message], tag: int, *memory: Tensor) -> Work:
    """Begins to send and to receive.

    Where two ranks have exchanged nothing yet, one may wait here for the other to come to a message between them. So
    messages must be in an order in which no ranks wait for each other in a circle: for instance in that of the ranks.

    Args:
        group: Works on host memory.
        messages: They must be neither touched nor freed until they have been waited for.
        tag: Messages of one tag between two ranks arrive in the order in which both launch them. So one thread launches
            all messages of a tag.
        memory: Kept alive until then.
    """
    # What `dist.isend` and `dist.irecv` come to, after ten times as many calls of Python.
    works = [(group.send if sends else group.recv)([tensor], peer, tag) for sends, tensor, peer in messages]
    return Transfers(list(map(as_work, works)), *memory)


Steps = Generator[Work, None, Any]
"""Each step launches something and yields what the next one waits for; the last one returns the result."""


class Exchange:
    """Steps that follow each other. The first one is launched at once.

    Args:
        steps: The steps.
        threads: See them through from :meth:`hand_over` on; None leaves them to whoever waits.
    """

    def __init__(self, steps: Steps, threads: "ExchangeThreads | None" = None) -> None:
        self._steps = steps
        self._threads = threads
        self._result: Any = None
        self._error: Exception | None = None
        # Held until threads have ended it. An `Event` takes ten times as long, in every step.
        self._running: threading.Lock | None = None
        self.in_flight: Work | None = DONE
        """What is waited for next; None at the end."""
        self.has_ended = False
        """Whether there is nothing left to do, as all is done or something has failed."""
        self.go_on()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """Waits for what was launched last, and takes the next step. Whoever waits gets its error."""
        try:
            if self.in_flight is not None:
                self.in_flight.wait()
            self.in_flight = next(self._steps)
        except StopIteration as ended:
            self.in_flight, self._result, self.has_ended = None, ended.value, True
        except Exception as error:
            # What is in flight stays: its memory must outlive it.
            self._error, self.has_ended = error, True

    def hand_over(self) -> None:
        """Has threads complete it, and let go of its memory, while nobody waits."""
        if self._threads is not None and self._running is None and not self.has_ended:
            self._running = threading.Lock()
            self._running.acquire()
            self._threads.see_through(self)

    def end(self) -> None:
        """Releases those who wait for the threads. To be called once."""
        if self._running is not None:
            self._running.release()

    def wait(self) -> Any:
        """Blocks until all steps are done.

        Returns:
            The result, in every call.

        Raises:
            RuntimeError: One failed, for instance because another rank has ended; in every call.
        """
        if self._running is not None:
            with self._running:
                pass
        while not self.has_ended:
            self.go_on()
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks failed: {self._error}") from self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. Who asks does not wait, so threads complete it, if there are.

        Else it would, as far as the backend can tell, if this step is the last one that waits.
        """
        self.hand_over()
        if self._running is not None:
            return not self._running.locked()
        return self.in_flight is None or self._error is not None or self.in_flight.is_completed()


class ExchangeThreads:
    """Threads that see exchanges through, in the order in which they were handed over, while this object lives.

    The n-th waits for the n-th step of each exchange and takes the next one. So an exchange that waits for a slow wire
    between nodes does not hold up those within, and one thread launches the n-th messages of all exchanges. A thread
    starts when it first has something to do.

    Args:
        name: Theirs, shown by debuggers and profilers.
        most: How many there may be. The last one sees exchanges through to their end.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._line = _Line(name, most, [])
        # A SimpleQueue's `put` is reentrant: this may be called within a garbage collection.
        weakref.finalize(self, _stop_first, self._line)

    def see_through(self, exchange: Exchange) -> None:
        """Takes the steps of an exchange that has begun."""
        _pass_on(self._line, 0, exchange)


class _Line(NamedTuple):
    """What threads know: a reference to the object above would keep both alive for ever."""

    name: str
    most: int | None
    queues: "list[queue.SimpleQueue[Exchange | None]]"


def _pass_on(line: _Line, number: int, exchange: Exchange) -> None:
    if number == len(line.queues):
        # Only the thread before comes here.
        line.queues.append(queue.SimpleQueue())
        # A daemon: an exchange with a rank that has ended must not keep this process alive.
        threading.Thread(target=_see_through, args=(line, number), name=f"{line.name} {number}", daemon=True).start()
    line.queues[number].put(exchange)


def _stop_first(line: _Line) -> None:
    if line.queues:
        line.queues[0].put(None)


# Grad mode belongs to a thread, and a new one records gradients.
@torch.no_grad()
def _see_through(line: _Line, number: int) -> None:
    while (exchange := line.queues[number].get()) is not None:
        exchange.go_on()
        while number + 1 == line.most and not exchange.has_ended:
            exchange.go_on()
        if exchange.has_ended:
            exchange.end()
        else:
            _pass_on(line, number + 1, exchange)
        # While the thread waits for its next exchange, its variables must not keep the buffers of the last alive.
        del exchange
    if number + 1 < len(line.queues):
        line.queues[number + 1].put(None)


class Streams:
    """The order of work on a CPU: that of the program.

    torch makes a collective begin after what the launching stream has queued, and keeps its buffers until it is waited
    for. What is left to do: whoever waits later, on whatever stream, must come after it, without the host waiting.
    """

    are_several = False
    """Whether there may be work on more than one."""

    def current(self) -> Any:
        """The stream that is queued on now."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, ``stream`` is the current one."""
        return nullcontext()

    def another(self) -> Any:
        """A stream beside all others, where the device has several."""
        return None

    def wait_for(self, stream: Any) -> None:
        """Has the current stream wait for what ``stream`` has queued so far."""


class CudaStreams(Streams):
    """A GPU's.

    Args:
        device: The GPU.
    """

    are_several = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    @override
    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    @override
    def another(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @override
    def wait_for(self, stream: torch.cuda.Stream) -> None:
        self.current().wait_stream(stream)


class Arrivals:
    """The streams on which gradients became ready, if not on the one that reductions are launched from.

    Autograd runs the end of a gradient's way on the stream that its parameter was first used on: for a captured graph
    that is the one it was captured on. Backward's own stream comes after it when backward has ended, not before.

    Args:
        streams: Those of the gradients' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._launching = streams.current()
        self._others: dict[Hashable, set[Any]] = {}

    def begin(self) -> None:
        """Reductions are launched from the current stream from now on."""
        self._launching = self._streams.current()

    def note(self, bucket: Hashable) -> None:
        """A gradient of the bucket became ready on the current stream."""
        current = self._streams.current()
        if current != self._launching:
            self._others.setdefault(bucket, set()).add(current)

    def forget(self, bucket: Hashable) -> None:
        """The gradients of the bucket are not reduced, or do not exist any more."""
        self._others.pop(bucket, None)

    @contextmanager
    def waited_for(self, bucket: Hashable) -> Iterator[None]:
        """Within it the current stream is the launching one, which waits for all gradients of the bucket.

        Their streams wait in turn, so that memory that is freed within it is written again only when it was read.
        """
        # The current stream may have made some of them without a hook: those that are left over.
        others = {*self._others.pop(bucket, ()), self._streams.current()} - {self._launching}
        with self._streams.on(self._launching):
            for stream in others:
                self._streams.wait_for(stream)
            yield
        for stream in others:
            with self._streams.on(stream):
                self._streams.wait_for(self._launching)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Not collective."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
