"""Says for whom a rank waits, and where that one is, long before a timeout ends the wait.

Nothing is noted in a step. A thread looks once a second how far this rank has come, and publishes that to the process
group's store now and then. If nothing moves for some seconds, it reads what all ranks have published, and logs one
line. Calls in which all ranks must take part have names: :func:`watching`, or :func:`met` where they must not begin
before all have come.

The thread looks and publishes while the rank sleeps, computes, or waits in C++. Only C code that keeps Python's lock
stops it, as the end of a process does, or SIGSTOP. Then the age of what was published says so.
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
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.core.digests import digest
from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.liveness import (
    Liveness,
    add_explanation,
    explanation_of,
    is_of_a_collective,
    names_of,
)
from lightning_parstrat.distributed.comm.process_groups import known_groups
from lightning_parstrat.distributed.torch_compat import collectives_launched, default_store

log = logging.getLogger(__name__)

WARN_AFTER = 15.0
"""Seconds."""

_AGAIN = (1.0, 4.0, 20.0)
"""When a wait is spoken of, in units of the time after which it is first; then after each of the last."""

_MOST_SIGNS_PER_SECOND = 200.0
_STORE_ANSWERS_WITHIN = 2.5
"""Seconds."""

Position = Callable[[], tuple[str, str]]
"""How far a training has come, such as "step 812, epoch 3, batch 12", and which of Lightning's hooks it is within."""

T = TypeVar("T")


class Sign(NamedTuple):
    """Where a rank was when it gave a sign of life.

    Attributes:
        number: How many signs it has given.
        at: When, in seconds since the epoch.
        ended: How its training has ended; empty while it goes on.
        position: How far the training has come.
        within: What it is within: the innermost named call, else Lightning's hook.
        counts: How many named calls it has entered, and collectives it has launched by each process group: the same on
            ranks at the same point.
        waits: Whether its stack shows that it waits in a collective. It does not show what torch waits for in C++, as
            in DDP's backward, and on GPUs nothing for which streams wait.
        line: The line of the user's program that it executes.
        still: For how many seconds nothing has moved.
    """

    number: int
    at: float
    ended: str
    position: str
    within: str
    counts: dict[str, int]
    waits: bool = False
    line: str = ""
    still: float = 0.0

    @property
    def point(self) -> tuple[object, ...]:
        """The same on ranks that wait for others together, and as long as nothing moves."""
        return self.ended, self.position, self.within, self.counts

    def is_behind(self, other: "Sign") -> bool:
        """Whether the other one has entered a call, or launched a collective, that this one has not."""
        return any(self.counts.get(name, 0) < number for name, number in other.counts.items())

    def __str__(self) -> str:
        position = f"({self.position})" if self.within and self.position else self.position
        return " ".join(filter(None, ("in", self.within, position, self.line and f"at {self.line}")))


Signs = list[Sign | None]
"""The latest of each rank, in their order; None of one that has given none."""


class _Still:
    """What is known of this rank since something has last moved."""

    def __init__(self, where: Sign, used: float) -> None:
        self.where, self.used = where, used
        self.seconds = self.asks_after = 0.0
        # Lines that were due, also those that another rank has said; and the last that this one has.
        self.lines, self.line = 0, ""
        self.asked: float | None = None
        self.known: Signs | None = None


class Watch:
    """Where this process is, and the thread that says so.

    Args:
        liveness: Where ranks meet; its name is the same on all ranks and different for each training.
        speaker: What lines begin with.
        warn_after: After how many seconds in which nothing moves a rank says that it waits; None for never.
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
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Each rank of many gives signs less often: rank 0's process serves the store.
        self._period = max((warn_after or WARN_AFTER) / 3, self._world_size / _MOST_SIGNS_PER_SECOND)
        # torch's type stubs lack `clone` and `multi_get`.
        self._store: Any = PrefixStore(f"lightning_parstrat/waits/{liveness.name}", default_store())
        self._calls: list[tuple[str, str]] = []
        self._entered: dict[str, int] = defaultdict(int)
        self._thread: threading.Thread | None = None
        self._stopping, self._ended, self._signs = threading.Event(), "", 0

    def begin(self) -> None:
        """Starts the thread."""
        if self._warn_after is None:
            return
        # Some launchers train in another thread than the main one.
        self._trains_in, self._system_thread = threading.get_ident(), threading.get_native_id()
        self._process, self._ended = os.getpid(), ""
        self._still = _Still(self._where(), 0.0)
        # Not the last one's: a thread of it must end when it comes back.
        stopping = self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(stopping, self._warn_after), name=_THREADS_NAME, daemon=True
        )
        self._thread.start()

    def end(self, how: str | None = None, wait: bool = False) -> None:
        """Ends the thread; does nothing where there is none. Not collective.

        Args:
            how: How this rank's training has ended, for ranks that wait for it; None where it goes on.
            wait: Whether rank 0, which may serve the store, waits for the others to end theirs: up to two seconds.
        """
        thread, self._thread = self._thread, None
        # A forked process has no threads, but a copy of their sockets.
        if thread is None or self._process != os.getpid():
            return
        self._ended = how or ""
        self._stopping.set()
        thread.join(_STORE_ANSWERS_WITHIN)
        if wait and self._rank == 0:
            ended, deadline = [f"ended/{rank}" for rank in range(self._world_size)], time.monotonic() + 2.0
            with suppress(RuntimeError):
                while not self._store.check(ended) and time.monotonic() < deadline:
                    time.sleep(0.01)

    @contextmanager
    def within(self, what: str, advice: str) -> Iterator[None]:
        """Within it this rank counts as being in the call; see :func:`watching`."""
        self._entered[what] += 1
        self._calls.append((what, advice))
        # Before and after a training, there is a thread while somebody may wait.
        brief = self._thread is None
        try:
            if brief:
                self.begin()
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self._calls.remove((what, advice))
            if brief:
                self.end()

    def said(self) -> str:
        """What was said since something has last moved; else what there is to say by now, if anything."""
        return self._said_at(_line_of(_frames_of_thread(threading.get_ident())))

    def explain(self, error: BaseException) -> None:
        """Adds to the error of a collective who has not come, and where they are.

        Not collective. Up to 2.5 seconds of waiting for the store.
        """
        if is_of_a_collective(error) and not explanation_of(error):
            frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            if said := self._said_at(_line_of(frames)):
                add_explanation(error, said)

    def _said_at(self, line: str) -> str:
        if self._thread is None or self._still.line:
            return "" if self._thread is None else self._still.line
        where = self._where()._replace(waits=True, line=line, still=self._still.seconds)
        return self._line_of_wait(where, None, self._ask(self._read))

    def _run(self, stopping: threading.Event, warn_after: float) -> None:
        # The store ends with the process that serves it: then nobody could be told, or asked.
        with suppress(RuntimeError):
            # Its own: the calls of one client wait for each other, and the training's may be waiting.
            client = self._store.clone()
            look = min(1.0, warn_after / 10)
            before = published = time.monotonic()
            self._publish(client)
            while not stopping.wait(look):
                passed, before = time.monotonic() - before, time.monotonic()
                where = self._where()
                if where.point != self._still.where.point:
                    self._still = _Still(where, self._used())
                else:
                    # A process that was stopped has not waited meanwhile.
                    self._still.seconds += min(passed, 2 * look)
                    self._look(self._still, warn_after)
                if before - published >= self._period:
                    self._publish(client)
                    published = before
            if stopping is self._stopping:
                self._publish(client)
                # Answered, unlike `set`: it must have arrived before the process ends.
                client.add(f"ended/{self._rank}", bool(self._ended))

    def _publish(self, client: Any) -> None:
        # A request that has no answer, of some 300 bytes.
        client.set(f"sign/{self._rank}", json.dumps(self._sign()))

    def _sign(self) -> Sign:
        self._signs += 1
        frames = _frames_of_thread(self._trains_in)
        return self._where()._replace(waits=_waits(frames), line=_line_of(frames), still=self._still.seconds)

    def _where(self) -> Sign:
        """Where this rank is, as far as it is known without a look at its stack."""
        position = hook = ""
        # What it reads may be about to change: then it is read again in a moment.
        with suppress(Exception):
            position, hook = self._position()
        calls = self._calls[-1:]
        launched = {f"launched by {name}": _launched_by(name, group) for name, group in known_groups().items()}
        within = calls[0][0] if calls else f"`{hook}`" if hook else ""
        return Sign(self._signs, time.time(), self._ended, position, within, {**self._entered, **launched})

    def _look(self, still: _Still, warn_after: float) -> None:
        """Says what there is to say of a wait: by what ranks published some time before, and publish now."""
        number = still.lines
        due = warn_after * (_AGAIN[number] if number < len(_AGAIN) else _AGAIN[-1] * (number - len(_AGAIN) + 2))
        # Others' output is read by fewer people than rank 0's.
        due += min(1.0, warn_after / 10) * (self._rank > 0)
        if still.seconds < max(due - 2 * self._period, still.asks_after):
            return
        where = self._sign()
        if not where.waits and (still.seconds < due - self._period or self._is_at_work(still)):
            return
        if still.asked is None:
            # One of those that may wait looks for all.
            turn = f"{where.waits}/{int(2 * time.time() / warn_after)}"
            still.known = self._ask(lambda client: self._read(client) if self._takes(client, turn) else [])
            if still.known == []:
                still.asks_after = still.seconds + warn_after / 2
                return
            still.asked = still.seconds
        if still.seconds >= max(due, still.asked + 1.5 * self._period):
            self._speak(still, where)

    def _speak(self, still: _Still, where: Sign) -> None:
        line = self._line_of_wait(where, still.known, self._ask(self._read))
        # Whoever waits at the same point would say the same.
        turn = f"{still.lines}/{digest(tuple(where.point))}"
        is_first = not line or self._ask(lambda client: self._takes(client, turn)) is not False
        still.asked, still.lines = None, still.lines + 1
        # It may have gone on meanwhile.
        if line and is_first and self._still is still and not self._stopping.is_set():
            still.line = line
            log.warning(line)

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

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """What the store answers, over a connection of its own; None where it does not answer in time."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question(self._store.clone()))

        thread = threading.Thread(target=ask, name=_THREADS_NAME, daemon=True)
        thread.start()
        thread.join(_STORE_ANSWERS_WITHIN)
        return answers[0] if answers else None

    def _takes(self, client: Any, turn: str) -> bool:
        """Whether this rank is the first that takes the turn."""
        return client.add(f"turn/{turn}", 1) == 1  # type: ignore[no-any-return]

    def _read(self, client: Any) -> Signs:
        keys = [f"sign/{rank}" for rank in range(self._world_size)]
        # Of one that is missing, the store would wait until it is there.
        there = [True] * len(keys) if client.check(keys) else [client.check([key]) for key in keys]
        found = iter(client.multi_get([key for key, is_there in zip(keys, there, strict=True) if is_there]))
        return [Sign(*json.loads(next(found))) if is_there else None for is_there in there]

    def _line_of_wait(self, where: Sign, known: Signs | None, now: Signs | None) -> str:
        """What is to be said of a wait; empty where it is not sure to be one.

        Args:
            where: This rank's.
            known: Signs of all ranks some time before, to see which have given one since; None where there are none.
            now: Their signs; None where the store does not answer.
        """
        if not (where.waits or now is None or any(sign and sign.is_behind(where) for sign in now)):
            return ""
        if now is None:
            for_whom = f". {_NO_STORE}"
        elif elsewhere := self._elsewhere(where, known, now):
            for_whom = f" for {elsewhere}"
        else:
            for_whom = f". {_ALL_THERE}"
        advice = "".join(f" {advice}" for _, advice in self._calls[-1:] if advice)
        return f"{self._speaker}: rank {self._rank} has waited {where.still:.0f} s {where}{for_whom}.{advice}"

    def _elsewhere(self, where: Sign, known: Signs | None, now: Signs) -> str:
        """Which ranks are not where this one is, and where each of them is; empty if all are there."""
        ranks_of: dict[str, list[int]] = defaultdict(list)
        said: dict[str, str] = {}
        for rank, sign in enumerate(now):
            silent = self._silence(sign, known[rank] if known else None)
            is_there = sign and not silent and sign.point == where.point and sign.waits == where.waits
            if rank != self._rank and not is_there:
                # Those at the same place are named together, however long they have been there.
                same = f"{silent > 0}{sign and sign.ended}{sign}"
                ranks_of[same].append(rank)
                said.setdefault(same, _described(sign, silent))
        shown = [
            f"{names_of(ranks)}, {'which' if len(ranks) == 1 else 'each of which'} {said[same]}"
            for same, ranks in list(ranks_of.items())[:_PLACES_NAMED]
        ]
        left = sum(map(len, list(ranks_of.values())[_PLACES_NAMED:]))
        return "; ".join([*shown, f"{left} more, which are elsewhere"] if left else shown)

    def _silence(self, sign: Sign | None, known: Sign | None) -> float:
        """For how many seconds a rank has given no sign, where it should have; else 0."""
        if sign is None or sign.ended:
            return 0.0
        age = max(time.time() - sign.at, self._period)
        # Clocks of nodes may differ, so the number counts where an earlier one is known.
        has_gone_on = known.number < sign.number if known else age < 3 * self._period
        return 0.0 if has_gone_on else age


_PLACES_NAMED = 4

_ALL_THERE = (
    "All ranks are there, and none goes on: a connection or a disk is slow or cut off, or they wait for different parts"
)
_NO_STORE = (
    "Where the others are is not known: the store does not answer, which rank 0's process or its launcher serves. It is"
    " stopped, or cannot be reached"
)


def _described(sign: Sign | None, silent: float) -> str:
    if sign is None:
        return "has given no sign of life since training was set up"
    if sign.ended:
        return sign.ended
    if silent:
        return (
            f"has given no sign of life for {silent:.0f} s (ended, stopped, cut off, or in C code that keeps Python's"
            f" lock) and was last {sign}"
        )
    return f"is {sign}"


def _launched_by(name: str, group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched by a group, as far as all ranks count the same.

    Gloo counts messages between two ranks, too, of which each rank has its own number. By the default group, where
    users' collectives run, and those of Lightning and DDP, such messages are rare.
    """
    counts_messages = group.name() == "gloo" and name != "default"
    return small_reductions_of(group) + (0 if counts_messages else collectives_launched(group))


Frames = list[tuple[str, int]]
"""File and line, the innermost last."""


def _frames_of_thread(thread: int) -> Frames:
    """What a thread of this process executes now; empty if it has ended.

    While Python 3.11 makes a frame object it may collect garbage, which lets the other thread go on, and then writes
    into memory that is no longer that frame's. What follows is a crash, or anything, so none is collected meanwhile.
    """
    # One look at a time: the end of another one would switch it on.
    with _ONE_LOOK:
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


_ONE_LOOK = threading.RLock()

_OWN = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent
_STANDARD = (*{sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}, "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_WAITS = (str(Path(__file__).parent), str(_TORCH / "distributed"), str(_TORCH / "nn" / "parallel" / "distributed.py"))
# On their way to a collective, operators on tensors in shards go through the first. They compute, too.
_COMPUTES = (str(_TORCH / "distributed" / "tensor"), __file__)
_TORCHS_CALLS = tuple(
    str(_TORCH / name) for name in ("_ops.py", "_library", "_tensor.py", "autograd/function.py", "utils/_pytree.py")
)


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in _INSTALLED)


def _waits(frames: Frames) -> bool:
    """Whether a stack shows that its thread waits in a collective."""
    for file, _ in reversed(frames):
        if not file.startswith(_TORCHS_CALLS) and (_is_installed(file) or not file.startswith(_STANDARD)):
            return file.startswith(_WAITS) and not file.startswith(_COMPUTES)
    return False


def _line_of(frames: Frames) -> str:
    """The innermost line that belongs to no library; else the innermost of all."""
    libraries = (*_STANDARD, str(_OWN))
    users = [frame for frame in frames if not (_is_installed(frame[0]) or frame[0].startswith(libraries))]
    return "".join(f"{Path(file).name}:{line}" for file, line in (users or frames)[-1:])


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


_THREADS_NAME = "lightning_parstrat watch"
_EXIT_AFTER = 30.0


def _let_threads_end() -> None:
    """Waits for threads that are in the store's C++ code, up to 30 seconds.

    One that came back while the interpreter is torn down would abort the process: a training that has ended well would
    count as failed. After a wire was cut, TCP sends again after at most as long as the cut was.
    """
    deadline = time.monotonic() + _EXIT_AFTER
    for thread in threading.enumerate():
        if thread.name == _THREADS_NAME:
            thread.join(max(0.0, deadline - time.monotonic()))


# The last that is registered runs first.
atexit.register(_let_threads_end)
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
