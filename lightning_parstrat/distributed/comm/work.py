"""What is in flight: one transfer, several that are waited for as one, and exchanges that a thread sees through."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor


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
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Blocks until all are done.

        Raises:
            RuntimeError: One of them has failed, for instance because another rank has ended. A second call raises at
                once, where Gloo would block until the timeout on transfers that had already completed.
        """
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks has failed before: {self._error}") from self._error
        try:
            for transfer in self._transfers:
                transfer.wait()
        except RuntimeError as error:
            self._error = error
            raise
        # This object may be held for longer than the buffers should live.
        self._transfers, self._memory = (), ()

    def is_completed(self) -> bool:
        """Whether all are done, as far as the backend can tell."""
        return all(transfer.is_completed() for transfer in self._transfers)


DONE: Work = Transfers(())
"""A collective that has nothing to do."""


class Followed:
    """A transfer, and what whoever waits for it first does once it has arrived.

    Args:
        transfer: Is waited for.
        action: Called once.
    """

    def __init__(self, transfer: Work, action: Callable[[], object]) -> None:
        self._transfer = transfer
        self._action: Callable[[], object] | None = action

    def wait(self) -> None:
        """Blocks until the action is done."""
        self._transfer.wait()
        if self._action is not None:
            self._action()
            # It may hold buffers, and this object may be held for longer than they should live.
            self._action = None

    def is_completed(self) -> bool:
        """Whether the transfer has arrived, as far as the backend can tell."""
        return self._transfer.is_completed()


class ExchangedWork:
    """An exchange that a thread completes; every wait raises the thread's exception."""

    def __init__(self) -> None:
        # Held until the exchange has ended. An `Event` takes ten times as long, in every step.
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the exchange has ended.

        Raises:
            RuntimeError: It failed, for instance because another rank has ended.
        """
        with self._running:
            pass
        if self._error is not None:
            raise RuntimeError(f"An exchange between ranks failed: {self._error}") from self._error

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._running.locked()

    def finish(self, error: BaseException | None = None) -> None:
        """Releases those who wait. To be called once."""
        self._error = error
        self._running.release()


_Task = tuple[ExchangedWork, Callable[[], None]]


class ExchangeThread:
    """Runs what follows exchanges in a thread, one after the other, for as long as this object lives.

    Args:
        name: The thread's, shown by debuggers and profilers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def run(self, work: ExchangedWork, action: Callable[[], None]) -> None:
        """Calls ``action`` after those of earlier calls; if it raises, ``work`` has failed."""
        if self._tasks is None:
            # Started on first use: many collectives only carry small messages and need no thread. A SimpleQueue, as its
            # `put` is reentrant: the finalizer may call it within a garbage collection.
            self._tasks = queue.SimpleQueue()
            # A daemon: an exchange with a rank that has ended must not keep this process alive. It gets only the queue:
            # a reference to this object would keep both alive for ever.
            threading.Thread(target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put((work, action))


# Grad mode belongs to a thread, and a new one records gradients.
@torch.no_grad()
def _run_tasks(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        work, action = task
        try:
            action()
        # Any exception: a work that is never finished would block the thread that waits for it for ever.
        except BaseException as error:
            work.finish(error)
        # While the thread waits for its next task, its variables must not keep the buffers of the last alive.
        del task, work, action


class SeenThrough:
    """What whoever waits for it completes, or a thread, where it was handed over.

    Args:
        complete: Blocks until it is complete; may be called again.
        thread: Calls that where it was handed over.
    """

    def __init__(self, complete: Callable[[], object], thread: ExchangeThread) -> None:
        self._complete = complete
        self._thread = thread
        self._completed_by: Work | None = None

    def hand_over(self) -> None:
        """Has the thread complete it, and let go of its memory, while nobody waits."""
        if self._completed_by is None:
            self._completed_by = by_thread = ExchangedWork()
            self._thread.run(by_thread, partial(_see_through, self._complete, by_thread))

    def wait(self) -> None:
        """Blocks until it is complete.

        Raises:
            RuntimeError: It failed, for instance because another rank has ended.
        """
        if self._completed_by is None:
            self._complete()
            self._completed_by = DONE
        else:
            self._completed_by.wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. Who asks does not wait, so the thread completes it."""
        self.hand_over()
        return self._completed_by is not None and self._completed_by.is_completed()


def _see_through(complete: Callable[[], object], work: ExchangedWork) -> None:
    complete()
    work.finish()
