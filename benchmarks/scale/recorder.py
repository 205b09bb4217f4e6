"""Counts what the rank that is played launches and receives, phase by phase."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from torch import Tensor

Phase = Literal["setup", "first steps", "step", "full save", "sharded save", "load", "end"]
Kind = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
]

_LABORATORY = str(Path(__file__).resolve().parent)
_LATENCY_SECONDS, _SECONDS_PER_BYTE = 40e-6, 1e-9


@dataclass
class Counters:
    """What a phase costs the rank that is played."""

    launches: Counter[str] = field(default_factory=Counter)
    """By "group kind"."""
    messages: int = 0
    """From rank to rank that this rank's host sends; those within a collective of Gloo's or NCCL's are not seen."""
    sent_bytes: int = 0
    """Of these messages."""
    metadata_bytes: int = 0
    """Of pickled objects that this rank receives."""
    largest_receive_bytes: int = 0
    """What one operation receives, all of its messages together: its buffer."""
    groups: int = 0
    calls: int = 0
    """Calls of Python functions, those of the laboratory left out."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "launches": dict(self.launches)}


class Recorder:
    """Counts for one rank, and keeps what it has said and has to hear, by peer, tag, type and length.

    The code that is played plans by ``seconds``, which go on when this rank computes or launches: two plays are equal.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[Phase, Counters] = defaultdict(Counters)
        self.seconds = 0.0
        self.phase: Phase = "setup"
        self.groups: list[str] = []
        self.rooms: dict[tuple[object, ...], Tensor] = {}
        self.said: dict[tuple[object, ...], Tensor] = {}
        self._received: int | None = None

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Within it, it is that phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What is launched within it is one operation."""
        outer, self._received = self._received, 0 if self._received is None else self._received
        try:
            yield
        finally:
            self._received = outer

    def add_group(self) -> int:
        """The number of a new process group, whose purpose is not known yet."""
        self.counters[self.phase].groups += 1
        self.groups.append(f"group {len(self.groups)}")
        return len(self.groups) - 1

    def name_groups(self, names: dict[int, str]) -> None:
        """Says what groups are for, from now on."""
        for group, name in names.items():
            self.groups[group] = name

    def launch(self, group: int, kind: Kind, nbytes: int) -> None:
        """An operation begins; ``nbytes`` are those that this rank receives, or sends in a message."""
        counters = self.counters[self.phase]
        counters.launches[f"{self.groups[group]} {kind}"] += 1
        if kind == "send":
            counters.messages += 1
            counters.sent_bytes += nbytes
            return
        self.seconds += _LATENCY_SECONDS + nbytes * _SECONDS_PER_BYTE
        if self._received is not None:
            self._received = nbytes = self._received + nbytes
        counters.largest_receive_bytes = max(counters.largest_receive_bytes, nbytes)

    def note_metadata(self, nbytes: int) -> None:
        """Pickled objects have arrived."""
        self.counters[self.phase].metadata_bytes += nbytes

    @contextmanager
    def counting_calls(self) -> Iterator[None]:
        """Within it, calls of Python functions by this thread are counted."""
        counted: dict[Any, bool] = {}

        def count(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                code = frame.f_code
                if code not in counted:
                    counted[code] = not code.co_filename.startswith(_LABORATORY)
                self.counters[self.phase].calls += counted[code]

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)


@contextmanager
def not_counting_calls() -> Iterator[None]:
    """Within it, the laboratory does what other ranks would."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)
