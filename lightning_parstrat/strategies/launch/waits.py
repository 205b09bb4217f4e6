"""Logs which ranks a rank waits for, and the place that each has reached, long before a timeout ends the wait.

A step sends and records nothing for it. Once a second, a thread reads the counters of the Trainer and torch. It
publishes them to the process group's store every few seconds. If nothing moves for ``stall_warning_seconds``, the
thread reads the entries of all ranks, and logs one line.
"""

import atexit
import gc
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_parstrat.core.digests import digest
from lightning_parstrat.distributed.comm import process_groups
from lightning_parstrat.distributed.comm.liveness import names_of, store_under
from lightning_parstrat.strategies.lightning_compat import current_hook, trainer_of

log = logging.getLogger(__name__)

_SECONDS_TO_ANSWER = 2.5

_SECONDS_TO_CONNECT = 5.0

_THREADS_NAME = "lightning_parstrat waits"

Frames = list[tuple[str, int]]
Progress = Callable[[], tuple[str, str]]


class Sign(NamedTuple):
    """The point that a rank has reached.

    Attributes:
        number: How many signs the rank has published.
        ended: How its training has ended. Empty while it runs.
        position: How far the training has come. See :func:`progress_of`.
        within: The innermost named call, else Lightning's hook.
        launched: How many collectives it has launched by each process group.
        waits: Whether its stack shows that it waits in a collective. The stack does not show waits in torch's C++, as
            in DDP's backward. On GPUs it does not show what streams wait for.
        line: The line of the user's program that it executes.
        silent: For how many seconds it has published nothing, measured by the reader. 0 if it publishes in time.
    """

    number: int = 0
    ended: str = ""
    position: str = ""
    within: str = ""
    launched: dict[str, int] = {}  # noqa: RUF012
    waits: bool = False
    line: str = ""
    silent: float = 0.0

    @property
    def point(self) -> tuple[object, ...]:
        """The same on ranks that wait for others together. It stays the same while nothing moves."""
        return self.ended, self.position, self.within, self.launched

    def is_behind(self, other: "Sign") -> bool:
        """Whether the other rank has launched a collective that this one has not."""
        return any(self.launched.get(group, 0) < number for group, number in other.launched.items())

    def __str__(self) -> str:
        position = f"({self.position})" if self.within and self.position else self.position
        return " ".join(filter(None, ("in", self.within, position, self.line and f"at {self.line}")))


class _Still:
    """The state since the last progress. ``looks`` is whether this rank reads the store for all ranks at its point."""

    def __init__(self, point: tuple[object, ...]) -> None:
        self.point, self.seconds = point, 0.0
        self.lines = 0
        self.looks: bool | None = None


class Waits:
    """The thread of one training that logs which ranks this rank waits for.

    Args:
        name: The same on all ranks, and different for each training.
        speaker: The name that lines begin with.
        rank: This rank.
        world_size: The number of ranks.
        warn_after: After how many seconds without progress a rank logs that it waits.
        progress: Returns how far the training has come, and its hook. A bound method, held by a weak reference.
    """

    def __init__(
        self, name: str, speaker: str, rank: int, world_size: int, warn_after: float, progress: Progress
    ) -> None:
        self._speaker, self._warn_after, self._progress = speaker, warn_after, weakref.WeakMethod(progress)
        self._rank, self._world_size = rank, world_size
        # All ranks together publish at most 200 signs a second, because one process serves the store.
        self._period = max(warn_after / 3, self._world_size / 200)
        # A separate client: with the training's timeout, it would try for that long to reach a lost store.
        self._store = store_under(f"waits/{name}").clone()
        self._store.set_timeout(timedelta(seconds=_SECONDS_TO_CONNECT))
        # Some launchers train in another thread than the main thread.
        self._trains_in, self._process = threading.get_ident(), os.getpid()
        self._stopping, self._ended, self._signs = threading.Event(), "", 0
        self._still = _Still(())
        # Each rank's latest number, and the time of its first read.
        self._read_at: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._run, name=_THREADS_NAME, daemon=True)
        for other in list(_BEGUN):
            other.end()
        _BEGUN.append(self)
        self._thread.start()

    def end(self, how: str = "") -> None:
        """Ends the thread. Not collective.

        Args:
            how: How this rank's training has ended, for ranks that wait for it. Empty to publish nothing.
        """
        # A forked process has no threads, but has copies of their sockets.
        if self in _BEGUN and self._process == os.getpid():
            _BEGUN.remove(self)
            self._ended = how
            self._stopping.set()
            self._thread.join(_SECONDS_TO_ANSWER)

    def _run(self) -> None:
        # The store ends with the process that serves it. Then there is nothing to publish to, or to read.
        with suppress(RuntimeError):
            # A separate client, because the calls of one client wait for each other, and the training's may be waiting.
            client = self._store.clone()
            look = min(1.0, self._warn_after / 10)
            self._publish(client)
            before = published = time.monotonic()
            while not self._stopping.wait(look):
                passed, before = time.monotonic() - before, time.monotonic()
                # A process that was stopped has not waited for ranks meanwhile, only for the store's answers.
                self._look(min(passed, 2 * look + 2 * _SECONDS_TO_ANSWER))
                if before - published >= self._period:
                    self._publish(client)
                    published = before
            self._publish(client)

    def _publish(self, client: Any) -> None:
        # A request of some 300 bytes, without an answer.
        self._signs += 1
        client.set(f"sign/{self._rank}", json.dumps(self._sign()))

    def _sign(self) -> Sign:
        frames = _frames_of_thread(self._trains_in)
        return self._where()._replace(waits=_waits(frames), line=_line_of(frames))

    def _where(self) -> Sign:
        """The point that this rank has reached, without a look at its stack."""
        position = hook = ""
        progress = self._progress()
        # The values may change while they are read. A later look reads them again.
        with suppress(Exception):
            position, hook = progress() if progress is not None else ("", "")
        within = process_groups.current_call()[0] or (f"`{hook}`" if hook else "")
        return Sign(self._signs, self._ended, position, within, process_groups.launched_by_group())

    def _look(self, passed: float) -> None:
        """Logs a wait if it is due. It compares what ranks published some time ago with what they publish now."""
        where, still = self._where(), self._still
        if where.point != still.point:
            self._still = _Still(where.point)
            return
        still.seconds += passed
        times = (1, 4, 20 * (still.lines - 1))[min(still.lines, 2)]
        # Rank 0 logs first, because more people read its output than that of other ranks.
        due = self._warn_after * times + min(1.0, self._warn_after / 10) * (self._rank > 0)
        if still.looks is None and still.seconds >= due - 1.5 * self._period:
            sign = self._sign()
            # Ranks that wait at the same point would read and log the same.
            turn = f"turn/{still.lines}/{digest((sign.waits, *sign.point))}"
            taken = self._ask(lambda client: client.add(turn, 1))
            still.looks = taken in (1, None)
            if taken == 1:
                # A rank that publishes nothing between two looks is silent.
                self._ask(self._read)
        if still.seconds >= due:
            line = self._line(self._sign(), self._ask(self._read)) if still.looks else ""
            still.lines, still.looks = still.lines + 1, None
            # The training may have continued meanwhile.
            if line and self._where().point == still.point and not self._stopping.is_set():
                log.warning(line)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """The store's answer, over a separate connection. None if it does not answer in time."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question(self._store.clone()))

        thread = threading.Thread(target=ask, name=_THREADS_NAME, daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_ANSWER)
        return answers[0] if answers else None

    def _read(self, client: Any) -> list[Sign | None]:
        keys = [f"sign/{rank}" for rank in range(self._world_size)]
        # If a key is missing, `multi_get` would wait for it.
        there = [True] * len(keys) if client.check(keys) else [client.check([key]) for key in keys]
        found = iter(client.multi_get([key for key, is_there in zip(keys, there, strict=True) if is_there]))
        signs = [Sign(*json.loads(next(found))) if is_there else None for is_there in there]
        return [sign and sign._replace(silent=self._silence(rank, sign)) for rank, sign in enumerate(signs)]

    def _silence(self, rank: int, sign: Sign) -> float:
        # A rank publishes its next sign within a period. Clocks of other nodes are not read.
        if self._read_at.get(rank, (0, 0.0))[0] != sign.number:
            self._read_at[rank] = sign.number, time.monotonic()
        silence = time.monotonic() - self._read_at[rank][1]
        return silence if silence > 1.2 * self._period else 0.0

    def _line(self, where: Sign, now: list[Sign | None] | None) -> str:
        said = line_of_wait(self._rank, self._still.seconds, where, now)
        return f"{self._speaker}: {said} {process_groups.current_call()[1]}".rstrip() if said else ""


_BEGUN: list[Waits] = []


def line_of_wait(rank: int, seconds: float, where: Sign, now: Sequence[Sign | None] | None) -> str:
    """The line about a wait. Empty if it is not certain that the rank waits.

    Args:
        rank: This rank.
        seconds: For how long nothing has moved.
        where: The point that this rank has reached.
        now: The signs that all ranks have published. None if the store does not answer.
    """
    if not (where.waits or now is None or any(sign and sign.is_behind(where) for sign in now)):
        return ""
    line = f"rank {rank} has waited {seconds:.0f} s {where}"
    if now is None:
        return (
            f"{line}. Where the others are is not known: the store does not answer, which rank 0's process or its"
            " launcher serves. It is stopped, or cannot be reached."
        )
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for other, sign in enumerate(now):
        is_there = sign and not sign.silent and sign.point == where.point and sign.waits == where.waits
        if other != rank and not is_there:
            ranks_at[_described(sign)].append(other)
    if not ranks_at:
        return f"{line}. All ranks are there, and none goes on: a connection or a disk is slow or cut off."
    shown = [
        f"{names_of(ranks)}, {'which' if len(ranks) == 1 else 'each of which'} {described}"
        for described, ranks in list(ranks_at.items())[:4]
    ]
    left = sum(map(len, list(ranks_at.values())[4:]))
    return f"{line} for {'; '.join(shown)}{f'; {left} more, which are elsewhere' if left else ''}."


def _described(sign: Sign | None) -> str:
    if sign is None:
        return "has given no sign of life since training was set up"
    if sign.silent and not sign.ended:
        reasons = "ended, stopped, cut off, or in C code that keeps Python's lock"
        return f"has given no sign of life for {sign.silent:.0f} s or more ({reasons}) and was last {sign}"
    return sign.ended or f"is {sign}"


def _frames_of_thread(thread: int) -> Frames:
    """The lines that a thread of this process executes now, the innermost last. Empty if it has ended."""
    # Python 3.11 may collect garbage while it makes a frame object. The other thread then runs, and the frame object is
    # written into memory that is no longer that frame's.
    collects = gc.isenabled() and sys.version_info[:2] == (3, 11)
    if collects:
        gc.disable()
    try:
        frame, frames = sys._current_frames().get(thread), []
        # Frames are not kept: they would keep the step's tensors.
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return frames[::-1]
    finally:
        if collects:
            gc.enable()


_OWN = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (str(Path(process_groups.__file__).parent), f"{_TORCH}/distributed", f"{_TORCH}/nn/parallel")
# Operators on sharded tensors call collectives from these files. The files compute, too.
_COMPUTES = f"{_TORCH}/distributed/tensor"
_CALLS = tuple(f"{_TORCH}/{name}" for name in ("_ops.py", "_library", "_tensor.py", "autograd/function.py", "utils"))
_STANDARD = (*{sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}, "<")
_INSTALLED = "-packages/"


def _waits(frames: Frames) -> bool:
    """Whether a stack shows that its thread waits in a collective."""
    files = [file for file, _ in frames if _INSTALLED in file or not file.startswith(_STANDARD)]
    calls = [file for file in files if not file.startswith(_CALLS)][-1:]
    return any(file.startswith(_COLLECTIVES) and not file.startswith(_COMPUTES) for file in calls)


def _line_of(frames: Frames) -> str:
    """The innermost line that belongs to no library, else the innermost of all."""
    users = [frame for frame in frames if not (_INSTALLED in frame[0] or frame[0].startswith((*_STANDARD, _OWN)))]
    return "".join(f"{Path(file).name}:{line}" for file, line in (users or frames)[-1:])


@atexit.register
def _end_all() -> None:
    """Ends all threads, and waits up to 30 seconds for those in the store's C++ code.

    If such a thread returns while the interpreter is torn down, it aborts the process. Then a successful training would
    count as failed. After a cut of the network, TCP sends again after at most as long as the cut was.
    """
    for waits in list(_BEGUN):
        waits.end("ended")
    deadline = time.monotonic() + 30.0
    for thread in threading.enumerate():
        if thread.name == _THREADS_NAME:
            thread.join(max(0.0, deadline - time.monotonic()))


def progress_of(module: LightningModule | None) -> tuple[str, str]:
    """A module's step and batch, such as "step 812, batch 12", and hook, such as "training_step". Any thread."""
    trainer = trainer_of(module)
    if module is None or trainer is None or trainer.state.stage is None:
        return "", ""
    stage, fits = trainer.state.stage, trainer.state.fn == TrainerFn.FITTING
    trains = stage == RunningStage.TRAINING
    loop = trainer.fit_loop.epoch_loop if fits else getattr(trainer, f"{stage.value}_loop")
    progress = (loop.val_loop if fits and not trains else loop).batch_progress
    step = f"step {trainer.global_step}, " if fits else ""
    return f"{step}batch {progress.current.ready}{'' if trains else f' of {stage.value}'}", current_hook(module)
