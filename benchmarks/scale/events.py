"""What one rank does in a training, in order: the record that the parts of the laboratory hand to each other."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Phase = Literal["setup", "first steps", "replan", "step", "full save", "sharded save", "load", "end"]
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


class Launch(NamedTuple):
    """A collective or a message begins.

    Attributes:
        phase: In which part of a training.
        group: What the process group is for: "gradients", "parameters", "control", "checkpoint" or "world".
        kind: The operation.
        nbytes: Of the largest tensor that takes part: a reduce-scatter's input, an all-gather's output, a message.
        peer: The other rank of a message, the root of a broadcast, gather or scatter; None where there is none.
        number: Counts the launches of a record.
    """

    phase: Phase
    group: str
    kind: Kind
    nbytes: int
    peer: int | None
    number: int


class Wait(NamedTuple):
    """The host waits until the launch ``number`` has ended, if it has not."""

    phase: Phase
    number: int


class Compute(NamedTuple):
    """The device computes: the forward or backward of parameters of so many bytes, or their update."""

    phase: Phase
    kind: Literal["forward", "backward", "update"]
    nbytes: int


Event = Launch | Wait | Compute


def write_events(events: Iterable[Event], path: Path) -> None:
    """One JSON list a line, the name of the class first."""
    path.write_text("".join(json.dumps([type(event).__name__, *event]) + "\n" for event in events))


def read_events(path: Path) -> Iterator[Event]:
    """What :func:`write_events` has written."""
    classes = {cls.__name__: cls for cls in (Launch, Wait, Compute)}
    for line in path.read_text().splitlines():
        name, *values = json.loads(line)
        yield classes[name](*values)
