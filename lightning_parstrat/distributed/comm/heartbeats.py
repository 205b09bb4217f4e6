"""Heartbeats on a board: each rank writes now and then where it is, and whoever waits long reads where all are.

The board is the process group's store. A beat is one request that has no answer, of 300 to 1,000 bytes, every third of
the time after which a rank says that it waits: 5 s of 15. Of more than 1,000 ranks each writes less often, so that rank
0's process, which serves the store in a thread of C++, never gets more than 200 beats a second, some microseconds each.
That does not depend on steps: no step writes or reads anything. Nobody reads while nobody waits; when ranks do, one of
them reads all beats, twice, in two requests each (of 1,000 ranks some 0.5 MB), and the others ask in a request each
whose turn it is.
"""

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.distributed.comm.whereabouts import Beat
from lightning_parstrat.distributed.torch_compat import default_store

_MOST_BEATS_PER_SECOND = 200.0
_END = 2.0
"""Seconds that rank 0, which may serve the store, waits for the others to end their beats."""

_THREADS_NAME = "lightning_parstrat watch: heartbeats"
_EXIT_AFTER = 30.0
"""Seconds that the interpreter's end waits for a thread whose store does not answer."""

Beats = list[Beat | None]
"""The latest of each rank, in their order; None of one that has not begun."""

Compose = Callable[[Beats], str]


class Reading:
    """What is read of the board, once the thread has.

    Args:
        turn: Only the rank that asks first at each turn reads; empty for all.
        compose: Makes the line that is to be said of what was read; empty for none.

    Attributes:
        beats: None until they have been read.
        line: What is to be said by this rank.
        refused: Whether another rank reads, or says a line, instead of this one.
    """

    def __init__(self, turn: str = "", compose: Compose | None = None) -> None:
        self.turn, self.compose = turn, compose
        self.beats: Beats | None = None
        self.line = ""
        self.refused = False
        self.has_ended = threading.Event()
        self._asked = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self._asked


class Heartbeats:
    """Writes this rank's beats, and reads all, in a thread of its own over a connection of its own.

    The thread may wait for a store that does not answer; nobody waits for the thread.

    Args:
        name: The same on all ranks and different for each training.
        warn_after: After how many seconds a rank says that it waits.
        beat: What is written.
    """

    def __init__(self, name: str, warn_after: float, beat: Callable[[str], Beat]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.period = max(warn_after / 3, self.world_size / _MOST_BEATS_PER_SECOND)
        # torch's type stubs lack `clone`, `multi_get` and `timeout`.
        self._store: Any = PrefixStore(f"lightning_parstrat/heartbeats/{name}", default_store())
        self._beat = beat
        self._asked: list[Reading] = []
        self._wake = threading.Event()
        self._ending: str | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread."""
        self._ending = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._wake,), name=_THREADS_NAME, daemon=True)
        self._thread.start()

    def end(self, how: str | None, patience: float) -> None:
        """Ends the thread, which writes a last beat. Not collective.

        Args:
            how: How this rank's training has ended; None where it goes on.
            patience: How many seconds to wait for the thread.
        """
        self._ending = how or ""
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience)

    def wait_for_others_to_end(self) -> None:
        """For up to two seconds, on rank 0, which may serve the store: who still writes would log that it is lost."""
        if self.rank != 0:
            return
        ended = [f"ended/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + _END
        with suppress(RuntimeError):
            while not self._store.check(ended) and time.monotonic() < deadline:
                time.sleep(0.01)

    def write_now(self) -> None:
        """Has a beat be written before it is time."""
        self._wake.set()

    def read(self, reading: Reading) -> Reading:
        """Asks for all beats; returns at once."""
        self._asked.append(reading)
        self._wake.set()
        return reading

    def _run(self, wake: threading.Event) -> None:
        # The store ends with the process that serves it: then nobody could be told, or asked.
        with suppress(RuntimeError):
            # Its own: the calls of one client wait for each other, and the training's may be waiting.
            self._client = self._store.clone()
            while self._wake is wake:
                # Read once: who ends meanwhile gets another beat, which says so.
                ending = self._ending
                self._write(ending or "")
                if ending is not None:
                    return
                self._answer()
                if wake.wait(self.period):
                    wake.clear()

    def _write(self, ended: str) -> None:
        self._client.set(f"beat/{self.rank}", self._beat(ended).written())
        if ended:
            # Answered, unlike `set`: it must have arrived before the process ends.
            self._client.add(f"ended/{self.rank}", 1)

    def _answer(self) -> None:
        while self._asked:
            reading = self._asked.pop(0)
            if reading.turn and not self._take(reading.turn):
                reading.refused = True
            else:
                beats = reading.beats = self._read()
                line = reading.compose(beats) if reading.compose else ""
                # As many lines as were said: who reads at the same moment would say the same.
                reading.refused = bool(line) and not self._take(f"line/{sum(beat.lines for beat in beats if beat)}")
                reading.line = "" if reading.refused else line
            reading.has_ended.set()

    def _take(self, turn: str) -> bool:
        """Whether this rank is the first that takes the turn."""
        return self._client.add(f"turn/{turn}", 1) == 1  # type: ignore[no-any-return]

    def _read(self) -> Beats:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        # Of one that is missing, the store would wait until it is there.
        there = [True] * len(keys) if self._client.check(keys) else [self._client.check([key]) for key in keys]
        found = iter(self._client.multi_get([key for key, is_there in zip(keys, there, strict=True) if is_there]))
        return [Beat.read(next(found)) if is_there else None for is_there in there]


LOST_AFTER = 2.5
"""Seconds after which a store that has not answered is said not to."""


def _let_threads_end() -> None:
    """Waits for threads that are in the store's C++ code, up to :data:`_EXIT_AFTER`.

    One that came back while the interpreter is torn down would abort the process: a training that has ended well would
    count as failed. After a wire was cut, TCP sends again after at most as long as the cut was.
    """
    deadline = time.monotonic() + _EXIT_AFTER
    for thread in threading.enumerate():
        if thread.name == _THREADS_NAME:
            thread.join(max(0.0, deadline - time.monotonic()))


# Before the watch's own: it runs after that has told the threads to end.
atexit.register(_let_threads_end)
