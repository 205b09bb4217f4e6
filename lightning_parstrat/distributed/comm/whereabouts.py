"""Where a rank is: read off its thread's stack and its process groups, from outside, so that no step pays for it."""

import gc
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """A line of code that is being executed."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        # Python calls it `<module>` outside of functions.
        name = "the program" if self.function == "<module>" else f"`{self.function}`"
        return f"{name} ({Path(self.file).name}, line {self.line})"


class Whereabouts(NamedTuple):
    """What a rank was doing at a heartbeat.

    Attributes:
        position: How far the training has come, such as "step 812"; empty where there is none.
        hook: Lightning's name of what it is within, such as "backward"; empty between hooks.
        calls: The watched calls it is within, the innermost last: name, and how many of that name there were.
        collective: What it waits in; empty where it is at work, or where its stack does not show that it waits.
        launched: How many collectives it has launched by each process group; the same on ranks at the same point.
        stack: Its Python stack, the innermost last, without what libraries do among themselves.
        still: For how many seconds it has made no progress.
    """

    position: str = ""
    hook: str = ""
    calls: list[list[Any]] = []  # noqa: RUF012  (never changed: a NamedTuple's default)
    collective: str = ""
    launched: dict[str, int] = {}  # noqa: RUF012
    stack: str = ""
    still: float = 0.0

    @property
    def phase(self) -> str:
        """What it is within, and how far the training has come."""
        if self.calls:
            return f"{self.calls[-1][0]}, {self.position}".rstrip(", ")
        return (f"`{self.hook}` of {self.position}" if self.hook else self.position).removesuffix(" of ")

    def is_with(self, other: "Whereabouts") -> bool:
        """Whether both wait in the same collective, at the same point."""
        return bool(self.collective) and self._replace(stack="", still=0.0) == other._replace(stack="", still=0.0)

    def has_not_launched_as(self, other: "Whereabouts") -> bool:
        """Whether the other one has launched a collective that this one has not."""
        return any(self.launched.get(name, 0) < number for name, number in other.launched.items())

    def __str__(self) -> str:
        waits = f"waiting in {self.collective}" if self.collective else ""
        within = f"in {self.phase}" if self.phase else ""
        return ", ".join(filter(None, (waits, within, f"for {self.still:.0f} s", f"at {self.stack}")))


class Beat(NamedTuple):
    """One heartbeat as it is published.

    Attributes:
        number: How many there were; grows as long as the process runs.
        at: When, in seconds since the epoch, by the clock of the rank's node.
        ended: How its training has ended; empty while it goes on.
        said: The last turn, since it last made progress, in which it has said that it waits; 0 for none.
        lines: How often it has said so at all.
        where: Where it is.
    """

    number: int
    at: float
    ended: str
    said: int
    lines: int
    where: Whereabouts

    def written(self) -> str:
        """As text, of some 300 to 1,000 bytes."""
        return json.dumps([*self[:-1], list(self.where)])

    @classmethod
    def read(cls, text: str | bytes) -> "Beat":
        """What :meth:`written` has written."""
        read = json.loads(text)
        return cls._make([*read[:-1], Whereabouts._make(read[-1])])


def stack_of_thread(thread: int) -> list[Place]:
    """What a thread of this process executes now, the innermost last; empty if it has ended.

    Of the innermost 100 calls. Under Python 3.11 no garbage is collected meanwhile.
    """
    with _no_garbage_collected():
        return _places_from(sys._current_frames().get(thread))[::-1]


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    # While Python 3.11 makes a frame object it may collect garbage, which lets the other thread go on, and then writes
    # into memory that is no longer that frame's: what follows is a crash, or anything. `faulthandler` makes none, but
    # meets threads of torch's that are just entering Python, which are listed before they are whole.
    if sys.version_info[:2] != (3, 11):
        yield
        return
    # One look at a time: the end of another one would switch it on.
    with _ONE_LOOK:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


_ONE_LOOK = threading.RLock()
_DEEPEST = 100


def _places_from(frame: FrameType | None) -> list[Place]:
    # Frames are not kept: they would keep the step's tensors.
    places: list[Place] = []
    while frame is not None and len(places) < _DEEPEST:
        places.append(Place(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return places


def stack_of_error(error: BaseException) -> list[Place]:
    """Where an error was raised, the innermost last."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(_place_of_trace(trace))
        trace = trace.tb_next
    return places


def _place_of_trace(trace: TracebackType) -> Place:
    code = trace.tb_frame.f_code
    return Place(code.co_filename, code.co_name, trace.tb_lineno)


_STANDARD = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")
_OWN = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent
_TORCHS_WAITS = (str(_TORCH / "distributed"), str(_TORCH / "nn" / "parallel" / "distributed.py"))
# On their way to a collective, operators on tensors in shards go through these. They compute, too.
_TORCHS_SHARDS = str(_TORCH / "distributed" / "tensor")
_PASSED_THROUGH = ("_ops.py", "_library", "_tensor.py", "autograd/function.py", "utils/_pytree.py")
_TORCHS_CALLS = tuple(str(_TORCH / name) for name in _PASSED_THROUGH)
_OWN_FLOOR, _OWN_WAITS = str(_OWN / "distributed"), str(Path(__file__).parent)

_FOR = {
    "bucket_tuner": "the planning of buckets",
    "calibration": "the measurement of the wire",
    "clipping": "the norm of gradients",
    "control_messages": "the control message",
    "gatherer": "the exchange of parameters",
    "link_probe": "the measurement of the wire",
    "module_states": "the broadcast of the module's states",
    "parameter_bucket": "the exchange of parameters",
    "redistribution": "the exchange of optimizer state",
    "reducer": "the exchange of gradients",
    "reductions": "the exchange of gradients",
    "replanning": "the planning of buckets",
    "state_messages": "the exchange of optimizer state",
    "trained_parameters": "the message on trained parameters",
    "writing": "the end of a save",
}
"""What is waited for, by the file of this package that does."""

_FOR_ANY = {
    "agreement": "an agreement",
    "liveness": "a meeting of all ranks",
    "wait_for_all": "a meeting of all ranks",
}
"""The same of files that serve others, or of functions in them; one further out may know more."""


def collective_of(stack: list[Place]) -> str:
    """The collective that a stack shows to be waited in; empty where it shows none.

    It does not show what torch waits for in C++, as in DDP's backward, what a handle that the user waits for is of, and
    on GPUs nothing for which streams wait.
    """
    own_part = [place for place in stack if not (_is_standard(place) or place.file.startswith(_TORCHS_CALLS))]
    if not own_part or not _waits(own_part[-1]):
        return ""
    name = purpose = served = ""
    for place in reversed(own_part):
        if _is_torchs_wait(place):
            # The outermost: what was called, not what it is made of.
            name = name if place.function in ("wrapper", "<lambda>") else place.function
        elif place.file.startswith(_OWN_FLOOR):
            file = Path(place.file).stem
            purpose = purpose or _FOR.get(file, "")
            served = served or _FOR_ANY.get(place.function, _FOR_ANY.get(file, ""))
        else:
            break
    called, purpose = f"`{name}`" if name else "", purpose or served
    if called and purpose:
        return f"{called} for {purpose}"
    return called or purpose or f"`{own_part[-1].function}`"


def _is_installed(place: Place) -> bool:
    return any(folder in place.file for folder in _INSTALLED)


def _is_standard(place: Place) -> bool:
    return place.file.startswith((*_STANDARD, "<")) and not _is_installed(place)


def _is_of_a_library(place: Place) -> bool:
    return _is_installed(place) or place.file.startswith(_STANDARD)


def _is_torchs_wait(place: Place) -> bool:
    return place.file.startswith(_TORCHS_WAITS)


def _waits(place: Place) -> bool:
    ends_a_save = place.file.startswith(_OWN_FLOOR) and Path(place.file).stem == "writing" and place.function == "wait"
    # They wait for their own threads alone.
    looks_on = Path(place.file).stem in ("watch", "heartbeats")
    in_torch = _is_torchs_wait(place) and not place.file.startswith(_TORCHS_SHARDS)
    return (place.file.startswith(_OWN_WAITS) and not looks_on) or in_torch or ends_a_save


_MOST_SHOWN = 6
"""Of a stack, so that a line can still be read."""


def shown(stack: Iterable[Place]) -> str:
    """A stack on one line: lines that belong to no library, and the innermost one of all, with what called it."""
    places = [place for place in stack if not place.file.startswith("<")]
    users = [place for place in places if not (_is_of_a_library(place) or place.file.startswith(str(_OWN)))]
    innermost = [place for place in places[-1:] if place not in users[-1:]]
    kept = users[-_MOST_SHOWN + 1 :] + innermost
    return " > ".join(map(str, kept)) or "(unknown)"


def clock_time(seconds_ago: float) -> str:
    """The time of day so long ago, such as 12:03:04."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
