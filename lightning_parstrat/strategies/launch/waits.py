"""Logs which ranks wait for which others, and the place that each has reached, long before a timeout ends the wait.

A step sends and records nothing for it. Every few seconds, a thread of each rank reads the counters of the Trainer and
torch, and publishes them to the process group's store. Rank 0's thread reads all of them. If a rank has waited at one
point for ``stall_warning_seconds``, it logs one line.
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
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_parstrat.distributed.comm import process_groups
from lightning_parstrat.distributed.comm.liveness import names_of, store_under
from lightning_parstrat.strategies.lightning_compat import current_hook, trainer_of

log = logging.getLogger(__name__)

_SECONDS_TO_ANSWER = 5.0

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
        advice: What to do if other ranks do not make the named call.
        still: For how many seconds it has been at this point, measured by the reader.
        silent: For how many seconds it has published nothing, measured by the reader. 0 if it publishes in time.
    """

    number: int = 0
    ended: str = ""
    position: str = ""
    within: str = ""
    launched: dict[str, int] = {}  # noqa: RUF012
    waits: bool = False
    line: str = ""
    advice: str = ""
    still: float = 0.0
    silent: float = 0.0

    @property
    def point(self) -> tuple[object, ...]:
        """The same on ranks that wait for others together. It stays the same while nothing moves."""
        return self.ended, self.position, self.within, self.launched

    def is_behind(self, other: "Sign") -> bool:
        """Whether the other rank has launched a collective that this one has not."""
        return any(self.launched.get(group, 0) < number for group, number in other.launched.items())

    def after(self, before: "Sign | None", passed: float) -> "Sign":
        """This sign with its times, if the last one that was read, some seconds before, is ``before``."""
        still = before.still + passed if before and before.point == self.point else 0.0
        silent = before.silent + passed if before and before.number == self.number else 0.0
        return self._replace(still=still, silent=silent)

    def __str__(self) -> str:
        position = f"({self.position})" if self.within and self.position else self.position
        return " ".join(filter(None, ("in", self.within, position, self.line and f"at {self.line}")))


class Waits:
    """The thread of one training that publishes the point that this rank has reached. Rank 0's logs waits.

    Args:
        name: The same on all ranks, and different for each training.
        speaker: The name that lines begin with.
        rank: This rank.
        world_size: The number of ranks.
        warn_after: After how many seconds without progress of a rank it is logged that it waits.
        progress: Returns how far the training has come, and its hook. A bound method, held by a weak reference.
    """

    def __init__(
        self, name: str, speaker: str, rank: int, world_size: int, warn_after: float, progress: Progress
    ) -> None:
        self._speaker, self._warn_after, self._progress = speaker, warn_after, weakref.WeakMethod(progress)
        self._rank, self._world_size = rank, world_size
        # All ranks together publish at most 200 signs a second, because one process serves the store.
        self._period = max(warn_after / 3, self._world_size / 200)
        # A separate client, because the calls of one client wait for each other, and the training's may be waiting.
        self._store = store_under(f"waits/{name}").clone()
        # With the training's timeout, it would try for that long to reach a lost store.
        self._store.set_timeout(timedelta(seconds=_SECONDS_TO_ANSWER))
        # Some launchers train in another thread than the main thread.
        self._trains_in, self._process = threading.get_ident(), os.getpid()
        self._stopping, self._ended, self._signs = threading.Event(), "", 0
        self._read_before: list[Sign | None] = [None] * world_size
        self._logged: tuple[object, ...] = ()
        self._lines = 0
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
            self._thread.join(_SECONDS_TO_ANSWER / 2)

    def _run(self) -> None:
        # The store ends with the process that serves it. Then there is nothing to publish to, or to read.
        with suppress(RuntimeError):
            before = time.monotonic()
            self._publish()
            while not self._stopping.wait(self._period):
                passed, before = time.monotonic() - before, time.monotonic()
                self._publish()
                if self._rank == 0:
                    # A process that was stopped has not waited for ranks meanwhile.
                    self._log(self._read(min(passed, 2 * self._period)))
            self._publish()

    def _publish(self) -> None:
        # A request of some 300 bytes, without an answer.
        self._signs += 1
        position = hook = ""
        progress = self._progress()
        # The values may change while they are read. The next sign reads them again.
        with suppress(Exception):
            position, hook = progress() if progress is not None else ("", "")
        call, advice = process_groups.current_call()
        frames = _frames_of_thread(self._trains_in)
        sign = Sign(
            number=self._signs,
            ended=self._ended,
            position=position,
            within=call or (f"`{hook}`" if hook else ""),
            launched=process_groups.launched_by_group(),
            waits=_waits(frames),
            line=_line_of(frames),
            advice=advice,
        )
        self._store.set(f"sign/{self._rank}", json.dumps(sign))

    def _read(self, passed: float) -> list[Sign | None]:
        """The latest signs of all ranks, some seconds after the last read. For a rank that has published none, None."""
        keys = [f"sign/{rank}" for rank in range(self._world_size)]
        # If a key is missing, `multi_get` would wait for it.
        there = [True] * len(keys) if self._store.check(keys) else [self._store.check([key]) for key in keys]
        found = iter(self._store.multi_get([key for key, is_there in zip(keys, there, strict=True) if is_there]))
        read = [Sign(*json.loads(next(found))) if is_there else None for is_there in there]
        # Clocks of other nodes are not read.
        read = [sign and sign.after(before, passed) for sign, before in zip(read, self._read_before, strict=True)]
        self._read_before = read
        # A rank publishes its next sign within a period.
        return [sign and (sign if sign.silent > 2.2 * self._period else sign._replace(silent=0.0)) for sign in read]

    def _log(self, signs: Sequence[Sign | None]) -> None:
        where, line = line_of_wait(signs, self._warn_after)
        if where.point != self._logged:
            self._logged, self._lines = where.point, 0
        if line and where.still >= self._warn_after * (1, 4, 20 * (self._lines - 1))[min(self._lines, 2)]:
            self._lines += 1
            log.warning(f"{self._speaker}: {line}")


_BEGUN: list[Waits] = []


def line_of_wait(signs: Sequence[Sign | None], seconds: float) -> tuple[Sign, str]:
    """The line about the lowest rank that waits for others, and its sign. Both are empty if no rank certainly waits.

    Args:
        signs: The signs that all ranks have published.
        seconds: For how long a rank must have been at one point.
    """
    known = [sign for sign in signs if sign]
    stays = (sign for sign in known if sign.still >= seconds and not sign.ended and not sign.silent)
    where = next((sign for sign in stays if sign.waits or any(other.is_behind(sign) for other in known)), None)
    if where is None:
        return Sign(), ""
    waiting, others = list[int](), defaultdict[str, list[int]](list)
    for rank, sign in enumerate(signs):
        is_there = sign and not sign.silent and sign.point == where.point and sign.waits == where.waits
        (waiting if is_there else others[_described(sign)]).append(rank)
    line = f"{names_of(waiting)} {'has' if len(waiting) == 1 else 'have'} waited {where.still:.0f} s {where}"
    if not others:
        return where, f"{line}. All ranks are there, and none continues: a connection or a disk is slow or cut off."
    shown = [
        f"{names_of(ranks)}, {'which' if len(ranks) == 1 else 'each of which'} {described}"
        for described, ranks in list(others.items())[:4]
    ]
    left = sum(map(len, list(others.values())[4:]))
    more = f"; {left} more, which are elsewhere" if left else ""
    return where, f"{line} for {'; '.join(shown)}{more}. {where.advice}".rstrip()


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
        # Python's manual names no other way to where a thread is.
        frame, frames = sys._current_frames().get(thread), []  # noqa: SLF001
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
    # As `batch_idx` counts.
    batch = max(0, progress.current.ready - 1)
    return f"{step}batch {batch}{'' if trains else f' of {stage.value}'}", current_hook(module)
