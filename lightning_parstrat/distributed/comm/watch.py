"""Says where ranks wait for one that has not come, and where that one is, long before a timeout ends the wait.

A call in which all ranks must take part notes in memory that this rank is within it: :func:`watching`, or :func:`met`
where it must not begin before all have come. Two threads look after that. One looks at the clock; when a call has
waited for some seconds, it asks all ranks over the process group's store where they are, and logs one line. The other
one waits in the store for such a question, and answers with the call or the line of code that this rank is in.

While nobody waits long, nothing is sent. It costs one more connection per rank to the store's server, in which nothing
moves. A question takes about 200 bytes per rank, in a few requests of the rank that asks, and an answer three requests;
of all ranks that wait in one call, one asks. A rank that waits in C++, for a collective or a GPU, answers all the same,
as Python's lock is free then; one that holds the lock, or has ended, is said not to answer.
"""

import atexit
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.liveness import Liveness, is_of_a_collective, names_of
from lightning_parstrat.distributed.torch_compat import default_store

log = logging.getLogger(__name__)


class Times(NamedTuple):
    """When is asked, in seconds."""

    said_after: tuple[float, ...] = (8.0, 60.0, 300.0)
    """How long a call waits until the line about it, and until it is said again; then after each of the last."""
    look: float = 1.0
    """Between looks at the clock; ranks other than 0, whose output fewer people read, ask by one look later."""
    answers: float = 2.5
    """How long an asker waits for answers."""
    end: float = 2.0
    """How long rank 0, which may serve the store, waits for the others to end their watch."""


TIMES = Times()

_NEVER = timedelta(days=20)
"""Milliseconds of a wait have 31 bits."""


class _Call:
    """A call that this rank is within."""

    def __init__(self, what: str, number: int, advice: str) -> None:
        self.what, self.number, self.advice = what, number, advice
        self.since = time.monotonic()
        self.asked = 0
        self.said = ""

    @property
    def waited(self) -> float:
        return time.monotonic() - self.since

    def is_due(self, times: Times, rank: int) -> bool:
        known = times.said_after
        after = known[self.asked] if self.asked < len(known) else known[-1] * (self.asked - len(known) + 2)
        return self.waited >= after + times.look * (rank > 0)


class _Whereabouts(NamedTuple):
    """What a rank answers: the calls it is within, the innermost last, and where its code is."""

    calls: list[list[str | int]]
    place: str


class Watch:
    """What this process is within, and the threads that ask and answer about it.

    Args:
        liveness: Where ranks meet; its name is the same on all ranks and different for each training.
        speaker: What lines begin with.
        times: When is asked.
    """

    def __init__(self, liveness: Liveness, speaker: str, times: Times | None = None) -> None:
        self.liveness = liveness
        # torch's type stubs lack `clone` and `multi_set`.
        self._store: Any = PrefixStore(f"lightning_parstrat/watch/{liveness.name}", default_store())
        self._speaker = speaker
        self._times = TIMES if times is None else times
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._calls: list[_Call] = []
        self._numbers: dict[str, int] = defaultdict(int)
        # Some launchers train in another thread than the main one.
        self._trains_in = threading.get_ident()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def begin(self) -> None:
        """Starts the threads."""
        # Not the last one's: a thread of it that still waits in C++ must end when it comes back.
        stopping = self._stopping = threading.Event()
        self._trains_in, self._process = threading.get_ident(), os.getpid()
        targets = {"clock": self._look, "answers": self._answer}
        self._threads = [
            threading.Thread(target=target, args=(stopping,), name=f"lightning_parstrat watch: {name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def end(self, how: str | None = None, wait: bool = False) -> None:
        """Ends the threads; does nothing where there are none. Not collective.

        Args:
            how: How this rank's training has ended, for ranks that wait for it; None where it goes on.
            wait: Whether rank 0 waits briefly for the others to end theirs.
        """
        clock_and_answers, self._threads = self._threads, []
        # A forked process has no threads, but a copy of their sockets.
        if not clock_and_answers or self._process != os.getpid():
            return
        self._stopping.set()
        # Where the store is gone, the thread has noticed and ended.
        if clock_and_answers[1].is_alive():
            with suppress(RuntimeError):
                if how is not None:
                    self._store.set(f"ended/{self._rank}", how)
                self._store.set(f"to/{self._rank}", "end")
        for thread in clock_and_answers:
            thread.join(self._times.answers)
        if wait and self._rank == 0:
            self._wait_for_others_to_end()

    def _wait_for_others_to_end(self) -> None:
        """Rank 0 may serve the store: for whoever still listens when it goes, torch logs that it is lost."""
        ended = [f"ended/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._times.end
        with suppress(RuntimeError):
            while not self._store.check(ended) and time.monotonic() < deadline:
                time.sleep(0.01)

    @contextmanager
    def within(self, what: str, advice: str) -> Iterator[None]:
        """Within it this rank counts as being in the call, and is watched; see :func:`watching`."""
        self._numbers[what] += 1
        call = _Call(what, self._numbers[what], advice)
        # Before and after a training, threads are there while somebody may wait.
        brief = not self._threads
        self._calls.append(call)
        try:
            if brief:
                self.begin()
            yield
        except RuntimeError as error:
            if is_of_a_collective(error) and hasattr(error, "add_note"):
                error.add_note(call.said or f"It happened within {what}, in which all ranks must take part.")
            raise
        finally:
            self._calls.remove(call)
            if brief:
                self.end()

    def said(self) -> str:
        """What was last said of the call that this rank is within."""
        call = self._innermost()
        return "" if call is None else call.said

    def _innermost(self) -> _Call | None:
        calls = self._calls[-1:]
        return calls[0] if calls else None

    def _look(self, stopping: threading.Event) -> None:
        store: Any = None
        # The store is gone with rank 0, or says why not: then nobody could be asked.
        with suppress(RuntimeError):
            while not stopping.wait(self._times.look):
                call = self._innermost()
                if call is not None and call.is_due(self._times, self._rank):
                    call.asked += 1
                    # Its own: the calls of one client wait for each other, and the training's may be waiting.
                    store = store or self._store.clone()
                    self._ask(call, store)

    def _ask(self, call: _Call, store: Any) -> None:
        if store.add(f"asked/{call.what}/{call.number}/{call.asked}", 1) > 1:
            return
        answers = self._answers(store)
        # It may have gone on meanwhile.
        if self._innermost() is not call or self._stopping.is_set():
            return
        elsewhere = _elsewhere(call, answers, exactly=call.asked > 1)
        if elsewhere:
            said = (
                f"{self._speaker}, rank {self._rank}: {call.what} has waited {call.waited:.0f} s. All ranks must"
                f" take part, but {elsewhere}. {call.advice}".rstrip()
            )
            call.said = said
            log.warning(said)

    def _answers(self, store: Any) -> "dict[int, _Whereabouts | str]":
        """Where the other ranks are, or a word on why it is not known."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        places = [f"at/{rank}" for rank in others]
        # One request: empty answers, so that all are there to be read, and the questions.
        store.multi_set([*places, *(f"to/{rank}" for rank in others)], [""] * len(others) + ["?"] * len(others))
        deadline = time.monotonic() + self._times.answers
        read = store.multi_get(places)
        while not all(read) and time.monotonic() < deadline and not self._stopping.wait(self._times.answers / 10):
            read = store.multi_get(places)
        found: dict[int, _Whereabouts | str] = {}
        silent = 0
        for rank, answer in zip(others, read, strict=True):
            found[rank] = _Whereabouts(*json.loads(answer)) if answer else ""
            silent += not answer
            # A line names few ranks, so few are asked for one by one.
            if not answer and silent <= _NAMED and store.check([f"ended/{rank}"]):
                found[rank] = store.get(f"ended/{rank}").decode()
        return found

    def _answer(self, stopping: threading.Event) -> None:
        own = f"to/{self._rank}"
        with suppress(RuntimeError):
            store = self._store.clone()
            while not stopping.is_set():
                store.wait([own], _NEVER)
                # First, so that a question which comes from now on is seen, and one that came before is answered.
                store.delete_key(own)
                store.set(f"at/{self._rank}", self._whereabouts())

    def _whereabouts(self) -> str:
        # In a function of its own: a frame that was kept until the next question would keep the step's tensors.
        calls = [[call.what, call.number] for call in list(self._calls)]
        frame = sys._current_frames().get(self._trains_in)
        return json.dumps([calls, "" if frame is None else _place(frame)])


_NAMED = 16
"""As many as a line names; see :func:`names_of`."""

_PLACES_NAMED = 4


def _elsewhere(call: _Call, answers: "dict[int, _Whereabouts | str]", exactly: bool) -> str:
    """Who is not within the call, and where they are instead; empty if all are within.

    A rank that is within an earlier or later one of the same name may be at work for it, and only counts ``exactly``.
    """
    ranks_of: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        where = _where(call, answer, exactly)
        if where is not None:
            ranks_of[where].append(rank)
    said = [
        f"{names_of(ranks)} {one if len(ranks) == 1 else several} {rest}".rstrip()
        for (one, several, rest), ranks in list(ranks_of.items())[:_PLACES_NAMED]
    ]
    left = sum(map(len, list(ranks_of.values())[_PLACES_NAMED:]))
    return "; ".join(said) + (f"; {left} more are elsewhere" if left else "")


def _where(call: _Call, answer: "_Whereabouts | str", exactly: bool) -> tuple[str, str, str] | None:
    """Where a rank is, said of one and of several; None where it is within the call."""
    if isinstance(answer, str):
        silent = "does not answer (ended, or stuck)", "do not answer (ended, or stuck)", ""
        return ("has", "have", answer) if answer else silent
    if not answer.calls:
        return "is", "are", answer.place
    what = answer.calls[-1][0]
    if [call.what, call.number] in answer.calls or (what == call.what and not exactly):
        return None
    return "waits", "wait", f"{'elsewhere ' if what == call.what else ''}in {what}, {answer.place}"


_LIBRARIES = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[2])}
)


def _place(frame: FrameType) -> str:
    """The innermost line that belongs to no library, and where in a library it is."""
    innermost: FrameType | None = frame
    users = innermost
    while users is not None and users.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        users = users.f_back
    if users is None or users is innermost:
        return f"in {_line(frame)}"
    return f"in {_line(frame)}, called from {_line(users)}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    # Python calls it `<module>` outside of functions.
    name = "the program" if code.co_name == "<module>" else f"`{code.co_name}`"
    return f"{name} ({Path(code.co_filename).name}, line {frame.f_lineno})"


# By the default group, whose end frees them: what they hold of the store would keep its port.
_WATCHES: "weakref.WeakKeyDictionary[dist.ProcessGroup, Watch]" = weakref.WeakKeyDictionary()


def begin_watch(liveness: Liveness, speaker: str) -> None:
    """Watches this process from now on; whatever was watched before no longer is. Not collective.

    Args:
        liveness: Where ranks meet; its name is the same on all ranks and different for each training.
        speaker: What lines begin with.
    """
    end_watch()
    world = dist.group.WORLD
    if world is not None and dist.get_world_size() > 1:
        _WATCHES[world] = watch = Watch(liveness, speaker)
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
