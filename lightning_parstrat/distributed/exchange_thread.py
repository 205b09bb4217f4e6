"""A thread that sees exchanges between CPUs through to their end, so that nobody has to wait for them meanwhile.

Gloo cannot be asked whether a transfer is done, only be waited for. What follows a transfer (a sum, the next level of
an exchange, the release of its buffers) would otherwise have to wait for the end of backward. Transfers and sums hold
no lock of the interpreter's.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import torch


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
