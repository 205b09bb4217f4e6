"""Says where ranks wait for one that has not come, and where that one is, long before a timeout ends the wait.

Nothing is noted while a training runs. A thread samples, now and then, how far this rank has come; where it makes no
progress for some seconds, and its stack shows that it waits in a collective, it reads the
:mod:`heartbeats <lightning_parstrat.distributed.comm.heartbeats>` of all ranks, and logs one line. Calls in which all
ranks must take part have names: :func:`watching`, or :func:`met` where they must not begin before all have come.

The threads sample and write while the rank sleeps, computes, or waits in C++; only C code that keeps Python's lock
stops them, as the end of a process does, or SIGSTOP. Then the heartbeat's age says so.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.heartbeats import LOST_AFTER, Beats, Heartbeats, Reading
from lightning_parstrat.distributed.comm.liveness import Liveness, add_explanation, explanation_of, is_of_a_collective
from lightning_parstrat.distributed.comm.process_groups import known_groups
from lightning_parstrat.distributed.comm.waiting_lines import Wait, line_of_wait
from lightning_parstrat.distributed.comm.whereabouts import (
    Beat,
    Whereabouts,
    collective_of,
    shown,
    stack_of_error,
    stack_of_thread,
)
from lightning_parstrat.distributed.torch_compat import collectives_launched

log = logging.getLogger(__name__)

WARN_AFTER = 15.0
"""Seconds."""

_AGAIN = (1.0, 4.0, 20.0)
"""When a wait is spoken of, in units of the time after which it is first; then after each of the last."""

Position = Callable[[], tuple[str, str]]
"""How far a training has come, and which hook it is within; see ``Whereabouts``."""


class _Call:
    """A call that this rank is within."""

    def __init__(self, what: str, number: int, advice: str) -> None:
        self.what, self.number, self.advice = what, number, advice


class _Still:
    """What is known of a rank that makes no progress."""

    def __init__(self, where: Whereabouts, used: float) -> None:
        self.where, self.used = where, used
        self.seconds = 0.0
        # Turns that are over, also those in which there was nothing to say; and the last in which there was.
        self.turns = self.last_said = 0
        self.line = ""
        self.first: Reading | None = None
        self.second: Reading | None = None

    def is_at(self, where: Whereabouts) -> bool:
        return self.where == where


class Watch:
    """What this process is within, and the threads that say so.

    Args:
        liveness: Where ranks meet; its name is the same on all ranks and different for each training.
        speaker: What lines begin with.
        warn_after: After how many seconds without progress a rank says that it waits; None for never.
        position: How far the training has come. Called by a thread, some times a second at most; holds nothing alive.
        waits_on_host: Whether a thread that waits uses no processor, as on CPUs; a GPU's may poll.
    """

    def __init__(
        self,
        liveness: Liveness,
        speaker: str,
        warn_after: float | None = WARN_AFTER,
        position: Position = lambda: ("", ""),
        waits_on_host: bool = True,
    ) -> None:
        self.liveness = liveness
        self._speaker, self._warn_after, self._position = speaker, warn_after, position
        self._waits_on_host = waits_on_host
        self._rank = dist.get_rank()
        self._heartbeats = None if warn_after is None else Heartbeats(liveness.name, warn_after, self._beat)
        self._calls: list[_Call] = []
        self._numbers: dict[str, int] = defaultdict(int)
        # Some launchers train in another thread than the main one.
        self._trains_in, self._system_thread = threading.get_ident(), threading.get_native_id()
        self._stopping = threading.Event()
        self._clock: threading.Thread | None = None
        self._process = os.getpid()
        self._still = _Still(Whereabouts(), 0.0)
        self._lines = self._written = 0

    def begin(self) -> None:
        """Starts the threads."""
        if self._heartbeats is None or self._warn_after is None:
            return
        # Not the last one's: a thread of it must end when it comes back.
        stopping = self._stopping = threading.Event()
        self._trains_in, self._system_thread = threading.get_ident(), threading.get_native_id()
        self._process = os.getpid()
        self._still = _Still(Whereabouts(), 0.0)
        self._heartbeats.begin()
        self._clock = threading.Thread(
            target=self._look_often, args=(stopping,), name="lightning_parstrat watch: clock", daemon=True
        )
        self._clock.start()

    def end(self, how: str | None = None, wait: bool = False) -> None:
        """Ends the threads; does nothing where there are none. Not collective.

        Args:
            how: How this rank's training has ended, for ranks that wait for it; None where it goes on.
            wait: Whether rank 0 waits briefly for the others to end theirs.
        """
        clock, self._clock = self._clock, None
        # A forked process has no threads, but a copy of their sockets.
        if clock is None or self._heartbeats is None or self._process != os.getpid():
            return
        self._stopping.set()
        self._heartbeats.end(how, LOST_AFTER)
        clock.join(LOST_AFTER)
        if wait:
            self._heartbeats.wait_for_others_to_end()

    @contextmanager
    def within(self, what: str, advice: str) -> Iterator[None]:
        """Within it this rank counts as being in the call; see :func:`watching`."""
        self._numbers[what] += 1
        call = _Call(what, self._numbers[what], advice)
        # Before and after a training, threads are there while somebody may wait.
        brief = self._clock is None
        self._calls.append(call)
        try:
            if brief:
                self.begin()
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self._calls.remove(call)
            if brief:
                self.end()

    def said(self) -> str:
        """What was said since this rank has last made progress; else what there is to say by now, if anything."""
        still = self._still
        if still.line or self._heartbeats is None or self._clock is None:
            return still.line
        stack = stack_of_thread(threading.get_ident())
        return self._said_of(collective_of(stack) or "a collective", shown(stack))

    def explain(self, error: BaseException) -> None:
        """Adds to the error of a collective who has not come, and where they are.

        Not collective. Up to 2.5 seconds of waiting for the store.
        """
        if not is_of_a_collective(error) or explanation_of(error):
            return
        stack = stack_of_error(error)
        line = self._still.line or self._said_of(collective_of(stack) or "a collective", shown(stack))
        if line:
            add_explanation(error, line)

    def _said_of(self, collective: str, stack: str) -> str:
        """What there is to say of a wait that has ended or is about to, and of which nothing was said."""
        if self._heartbeats is None or self._clock is None:
            return ""
        where = self._where()._replace(collective=collective, stack=stack, still=self._still.seconds)
        reading = self._heartbeats.read(Reading())
        reading.has_ended.wait(LOST_AFTER)
        return line_of_wait(self._wait(where), None, reading.beats)

    def _wait(self, where: Whereabouts) -> Wait:
        calls = self._calls[-1:]
        period = 0.0 if self._heartbeats is None else self._heartbeats.period
        return Wait(self._speaker, self._rank, where, calls[0].advice if calls else "", period)

    def _beat(self, ended: str) -> Beat:
        self._written += 1
        stack = stack_of_thread(self._trains_in)
        still = self._still
        where = self._where()._replace(collective=collective_of(stack), stack=shown(stack), still=still.seconds)
        return Beat(self._written, time.time(), ended, still.last_said, self._lines, where)

    def _where(self) -> Whereabouts:
        """Where this rank is, as far as it is known without a look at its stack."""
        position = hook = ""
        # What it reads may be about to change: then it is read again in a moment.
        with suppress(Exception):
            position, hook = self._position()
        calls = [[call.what, call.number] for call in list(self._calls)]
        launched = {name: _launched_by(name, group) for name, group in known_groups().items()}
        return Whereabouts(position, hook, calls, launched=launched)

    def _look_often(self, stopping: threading.Event) -> None:
        if self._warn_after is None:
            return
        look, before = min(1.0, self._warn_after / 10), time.monotonic()
        while not stopping.wait(look):
            passed, before = time.monotonic() - before, time.monotonic()
            where = self._where()
            if not self._still.is_at(where):
                self._still = _Still(where, self._used())
            else:
                # A process that was stopped has not waited meanwhile.
                self._still.seconds += min(passed, 2 * look)
                self._look(self._still, self._warn_after, look)

    def _look(self, still: _Still, warn_after: float, look: float) -> None:
        # Shortly before each line, not once: who has ended since the last one has beaten after that.
        if self._heartbeats is None or still.seconds < self._speaks_after(still, warn_after) - warn_after / 2:
            return
        stack = stack_of_thread(self._trains_in)
        where = still.where._replace(collective=collective_of(stack), stack=shown(stack), still=still.seconds)
        if not where.collective and (still.seconds < warn_after or self._is_at_work(still)):
            return
        if still.first is None or (still.first.refused and still.first.age > warn_after / 2):
            turn = f"{'wait' if where.collective else 'may wait'}/{int(2 * time.time() / warn_after)}"
            still.first = self._heartbeats.read(Reading(turn))
        elif self._is_due(still, warn_after, look, self._heartbeats.period):
            self._speak(still, where, still.first)

    def _is_due(self, still: _Still, warn_after: float, look: float, period: float) -> bool:
        if still.first is None or still.first.refused or still.first.age < 1.5 * period:
            return False
        # Others' output is read by fewer people than rank 0's.
        return still.seconds >= self._speaks_after(still, warn_after) + look * (self._rank > 0)

    def _speaks_after(self, still: _Still, warn_after: float) -> float:
        """Of how many seconds without progress the next line is."""
        after = _AGAIN[still.turns] if still.turns < len(_AGAIN) else _AGAIN[-1] * (still.turns - len(_AGAIN) + 2)
        return after * warn_after

    def _speak(self, still: _Still, where: Whereabouts, first: Reading) -> None:
        if self._heartbeats is None:
            return
        if still.second is None:
            wait, known, turns = self._wait(where), first.beats, still.turns

            def compose(beats: Beats) -> str:
                # Whoever has spoken has named this rank, too.
                if any(beat.said > turns for rank, beat in enumerate(beats) if beat and rank != self._rank):
                    return ""
                return line_of_wait(wait, known, beats)

            still.second = self._heartbeats.read(Reading(compose=compose))
        second = still.second
        if not second.has_ended.is_set() and second.age < LOST_AFTER:
            return
        still.first = still.second = None
        still.turns += 1
        line = second.line if second.has_ended.is_set() else line_of_wait(self._wait(where), first.beats, None)
        # It may have gone on meanwhile.
        if line and self._still is still and not self._stopping.is_set():
            still.line, still.last_said = line, still.turns
            self._lines += 1
            log.warning(line)
            self._heartbeats.write_now()

    def _is_at_work(self, still: _Still) -> bool:
        return self._waits_on_host and self._used() - still.used > still.seconds / 4

    def _used(self) -> float:
        """Seconds of a processor that the training's thread has used; 0 where the system does not say."""
        try:
            told = Path(f"/proc/self/task/{self._system_thread}/stat").read_text()
        except OSError:
            return 0.0
        # Behind the name, which may hold anything: 11 more fields, then what it used itself and in the kernel.
        used, in_kernel = told.rpartition(")")[2].split()[11:13]
        return (int(used) + int(in_kernel)) / os.sysconf("SC_CLK_TCK")


def _launched_by(name: str, group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched by a group, as far as all ranks count the same.

    Gloo counts messages between two ranks, too, of which each rank has its own number. By the default group, where
    users' collectives run, and those of Lightning and DDP, such messages are rare.
    """
    counts_messages = group.name() == "gloo" and name != "default"
    return small_reductions_of(group) + (0 if counts_messages else collectives_launched(group))


# By the default group, whose end frees them: what they hold of the store would keep its port.
_WATCHES: "weakref.WeakKeyDictionary[dist.ProcessGroup, Watch]" = weakref.WeakKeyDictionary()


def begin_watch(
    liveness: Liveness,
    speaker: str,
    warn_after: float | None = WARN_AFTER,
    position: Position = lambda: ("", ""),
    waits_on_host: bool = True,
) -> None:
    """Watches this process from now on; whatever was watched before no longer is. Not collective.

    Arguments are those of :class:`Watch`.
    """
    end_watch()
    world = dist.group.WORLD
    if world is not None and dist.get_world_size() > 1:
        _WATCHES[world] = watch = Watch(liveness, speaker, warn_after, position, waits_on_host)
        watch.begin()


def end_watch(how: str | None = None, wait: bool = False) -> None:
    """Ends the threads that :func:`begin_watch` has started. Not collective.

    Args:
        how: How the training has ended, for ranks that wait for this one, such as "ended its training".
        wait: Whether rank 0 waits up to two seconds for the others to end theirs, as they do after a training.
    """
    for watch in list(_WATCHES.values()):
        watch.end(how, wait)


# Threads that are in C++ when the interpreter is torn down could abort the process.
atexit.register(end_watch, "ended")


def explain_wait(error: BaseException) -> None:
    """Adds to the error of a collective which ranks have not come, and where those are, as far as it is known.

    Not collective; up to 2.5 seconds. Does nothing where it was done, or for other errors.
    """
    watch = _current_watch()
    if watch is not None:
        watch.explain(error)


def _current_watch() -> Watch | None:
    """None where nobody could be waited for."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return None
    watch = _WATCHES.get(world)
    if watch is None:
        _WATCHES[world] = watch = Watch(Liveness(""), "lightning_parstrat")
    return watch


@contextmanager
def watching(what: str, advice: str = "") -> Iterator[None]:
    """Within it, a rank that waits long for others says for which, and where they are.

    All ranks must enter it. Nothing is sent. An error of a collective that leaves it gets a note with what was said.

    Args:
        what: What the user has called.
        advice: What to do where some ranks have not.
    """
    watch = _current_watch()
    if watch is None:
        yield
        return
    with watch.within(what, advice):
        yield


@contextmanager
def met(what: str, group: dist.ProcessGroup, advice: str = "", of: str = "") -> Iterator[None]:
    """As :func:`watching`, and it only begins when all ranks have come, at the same point of the training.

    For calls that a user may make on some ranks only: their collectives would be answered by others that those ranks
    do next, and the results be mixed up. Here nothing is sent to them before. Costs each rank some four requests to
    the store, which rank 0's process serves one after the other: for what is rare.

    Args:
        what: What the user has called.
        group: The group by which the call communicates.
        advice: What to do where some ranks have not come.
        of: What the call is about, which must be the same on all ranks.

    Raises:
        MissingRanksError: Ranks did not come within the store's timeout, that of the default group.
        RuntimeError: They came at different points of the training, or with something else.
    """
    watch = _current_watch()
    if watch is None:
        yield
        return
    with watch.within(what, advice):
        watch.liveness.meet(what, f"{small_reductions_of(group)} {of}", watch.said)
        yield
