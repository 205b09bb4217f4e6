"""Writes down, in order, what the rank that is played launches, waits for and computes, and counts what that costs."""

import ctypes
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

import lightning_parstrat
from benchmarks.scale.events import Compute, Event, Kind, Launch, Phase, Wait
from benchmarks.scale.wires import Wire, gloo_hops, gloo_messages, gloo_peers

_OURS = str(Path(lightning_parstrat.__file__).resolve().parent)
_MESSAGES_BETWEEN_LOOKS = 64
_LABORATORY = str(Path(__file__).resolve().parent)


@dataclass
class Counters:
    """What a phase costs the rank that is played."""

    launches: Counter[str] = field(default_factory=Counter)
    """By "group kind"."""
    waits: Counter[str] = field(default_factory=Counter)
    """What has been waited for, by group: by the host, or for NCCL's groups (gradients, parameters, DDP's world) by a
    stream. A reduce-scatter made of many messages counts once."""
    messages: int = 0
    """Sent by this rank's host: by Gloo's groups, and by the default group, as if it were one."""
    hops: int = 0
    """The same operations' messages that follow one upon the other, wherever they are sent."""
    device_messages: int = 0
    """Sent by this rank's device in what NCCL carries, as in a ring: a kernel sends them, no host knows of them."""
    metadata_bytes: int = 0
    """Of pickled objects that this rank receives."""
    items: int = 0
    """What rank 0 is told of other ranks' shards, plans and files, one by one, and what it writes into an index."""
    store_requests: int = 0
    groups: int = 0
    """Process groups that are made."""
    calls: int = 0
    """Calls of Python functions, those of the laboratory left out."""
    own_calls: int = 0
    """Calls of functions of this package."""
    new_bytes: int = 0
    """The largest growth of the heap since the phase began; of what is played, see :class:`Shapes`."""
    largest_receive_bytes: int = 0
    """What one operation receives, all of its messages together."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "launches": dict(self.launches), "waits": dict(self.waits)}

    def numbers(self) -> dict[str, int]:
        """Every counter by a name of its own."""
        by_kind = {f"launches: {name}": number for name, number in self.launches.items()}
        by_group = {f"waits: {name}": number for name, number in self.waits.items()}
        sums = {"launches": sum(self.launches.values()), "waits": sum(self.waits.values())}
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**sums, **by_kind, **by_group, **plain}


class _Operation:
    """What is launched and waited for as one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.received = 0
        self.waited_for = False


class Recorder:
    """The record of one rank.

    Args:
        wire: What operations take, for code that looks at the clock: it sees a time that only goes on when this rank
            computes or waits, so that two records of the same training are equal.
        forward_seconds_per_byte: Of parameters; a backward takes twice as long.
        on_device: What those groups are for that NCCL carries.
    """

    def __init__(
        self, wire: Wire, forward_seconds_per_byte: float = 1e-9, on_device: frozenset[str] = frozenset()
    ) -> None:
        self.events: list[Event] = []
        self.counters: defaultdict[Phase, Counters] = defaultdict(Counters)
        self.peers: defaultdict[str, set[int]] = defaultdict(set)
        self.groups: list[str] = []
        """What each group is for, by its number."""
        self.rooms: dict[tuple[str, int, int, int], Tensor] = {}
        """Where this rank has begun to receive small messages, by purpose, peer, tag and bytes."""
        self.said: dict[tuple[str, int, int, int], Tensor] = {}
        """Small messages that it has sent, and has not received an answer to, by the same."""
        self.keeps_events = True
        self.seconds = 0.0
        self._wire = wire
        self._on_device = on_device
        self._forward_seconds_per_byte = forward_seconds_per_byte
        self._phase: Phase = "setup"
        self._launched = 0
        self._operation_of: dict[int, _Operation] = {}
        self._estimates: dict[int, float] = {}
        self._groups_of: dict[int, str] = {}
        self._operation: _Operation | None = None
        self._futures: list[int] = []
        self._in_background = 0
        self._host = threading.get_ident()
        self._lock = threading.Lock()
        self._launching = threading.local()
        self._heap_at_start = heap_bytes()

    @property
    def phase(self) -> Phase:
        """Which part of the training it is."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase != self._phase:
            self._look_at_heap()
            self._phase, self._heap_at_start = phase, heap_bytes()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Within it, it is that phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def launching_for(self, group: int) -> Iterator[None]:
        """Within it, what this thread launches by whatever group is what that group is for."""
        self._launching.purpose = self.groups[group]
        try:
            yield
        finally:
            del self._launching.purpose

    def purpose_of(self, group: int) -> str:
        """What is launched by a group is for: mostly what the group is for."""
        found: str = getattr(self._launching, "purpose", self.groups[group])
        return found

    def add_group(self) -> int:
        """The number of a new process group."""
        self.counters[self._phase].groups += 1
        self.groups.append(f"group {len(self.groups)}")
        return len(self.groups) - 1

    def launch(self, group: int, kind: Kind, nbytes: int, received: int, rank: int, size: int, peer: int | None) -> int:
        """An operation begins; ``received`` are the bytes that this rank gets from others. Returns its number."""
        # Threads of real ranks launch, too.
        with self._lock:
            return self._launch(group, kind, nbytes, received, rank, size, peer)

    def _launch(
        self, group: int, kind: Kind, nbytes: int, received: int, rank: int, size: int, peer: int | None
    ) -> int:
        number, self._launched = self._launched, self._launched + 1
        counters = self.counters[self._phase]
        name = self.groups[group]
        purpose = self.purpose_of(group)
        counters.launches[f"{purpose} {kind}"] += 1
        messages = gloo_messages(kind, nbytes, rank, size, peer)
        if name in self._on_device:
            counters.device_messages += messages
        else:
            counters.messages += messages
            counters.hops += gloo_hops(kind, nbytes, size)
        self.peers[name] |= gloo_peers(kind, rank, size, peer)
        operation = self._operation or _Operation()
        # Asking costs a microsecond for each of many messages.
        if len(operation.numbers) % _MESSAGES_BETWEEN_LOOKS == 0:
            self._look_at_heap()
        operation.numbers.append(number)
        operation.received += received
        counters.largest_receive_bytes = max(counters.largest_receive_bytes, operation.received)
        self._operation_of[number], self._groups_of[number] = operation, purpose
        self._estimates[number] = self._wire.seconds(kind, nbytes, size)
        self._note(Launch(self._phase, purpose, kind, nbytes, peer, number))
        return number

    def wait(self, number: int) -> None:
        """Somebody waits. What another thread sees through, a host waits for when it waits for that thread."""
        # A thread may wait in the host's place; and what has ended is not waited for.
        if self._in_background or threading.get_ident() != self._host or number not in self._operation_of:
            return
        operation = self._operation_of.pop(number)
        if not operation.waited_for:
            operation.waited_for = True
            self.counters[self._phase].waits[self._groups_of[number]] += 1
            self._look_at_heap()
        self.seconds += self._estimates.pop(number)
        del self._groups_of[number]
        self._note(Wait(self._phase, number))

    def expect(self, number: int) -> None:
        """Somebody in C++ has a future of it; see :meth:`wait_for_futures`."""
        self._futures.append(number)

    def wait_for_futures(self) -> None:
        """Somebody in C++ has waited for all futures that there were."""
        futures, self._futures = self._futures, []
        for number in futures:
            self.wait(number)

    def compute(self, kind: str, nbytes: int) -> None:
        """The device computes."""
        seconds = nbytes * self._forward_seconds_per_byte
        self.seconds += 2 * seconds if kind == "backward" else seconds
        self._look_at_heap()
        self._note(Compute(self._phase, kind, nbytes))  # type: ignore[arg-type]

    def note_metadata(self, nbytes: int) -> None:
        """Pickled objects have arrived."""
        self.counters[self._phase].metadata_bytes += nbytes

    def note_items(self, number: int) -> None:
        """This rank has been told of so many parts of tensors, or has noted them."""
        self.counters[self._phase].items += number

    def note_store_request(self) -> None:
        """This rank has asked the store for something, or told it; threads that watch over waits do not count."""
        if threading.get_ident() == self._host:
            self.counters[self._phase].store_requests += 1

    @contextmanager
    def as_one(self) -> Iterator[list[int]]:
        """What is launched within it is one operation; gives the numbers."""
        before, self._operation = self._operation, self._operation or _Operation()
        try:
            yield self._operation.numbers
        finally:
            self._operation = before

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Within it, it is another thread that waits, not the host."""
        self._in_background += 1
        try:
            yield
        finally:
            self._in_background -= 1

    @contextmanager
    def counting_calls(self) -> Iterator[None]:
        """Within it, calls of Python functions by this thread are counted."""
        ours: dict[Any, bool | None] = {}

        def count(frame: FrameType, event: str, _: object) -> None:
            if event != "call":
                return
            code = frame.f_code
            if code not in ours:
                file = code.co_filename
                ours[code] = None if file.startswith(_LABORATORY) else file.startswith(_OURS)
            own = ours[code]
            if own is not None:
                counters = self.counters[self._phase]
                counters.calls += 1
                counters.own_calls += own

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    @staticmethod
    @contextmanager
    def not_counting_calls() -> Iterator[None]:
        """Within it, the laboratory does what other ranks would."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def name_groups(self, names: dict[int, str]) -> None:
        """Says what groups are for, from now on."""
        for group, name in names.items():
            self.groups[group] = name

    def _note(self, event: Event) -> None:
        if self.keeps_events:
            self.events.append(event)

    def _look_at_heap(self) -> None:
        counters = self.counters[self._phase]
        counters.new_bytes = max(counters.new_bytes, heap_bytes() - self._heap_at_start)


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


_LIBC = ctypes.CDLL(None)
_LIBC.mallinfo2.restype = _Mallinfo


def heap_bytes() -> int:
    """What this process has allocated: tensors, and Python's large objects."""
    found = _LIBC.mallinfo2()
    return int(found.uordblks + found.hblkhd)
