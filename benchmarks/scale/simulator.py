"""Replays what one rank does in a training, and tells how long its step takes and how much of that nothing hides.

What the model knows:

- The host goes through the record. On a GPU it runs ahead: computations queue on the device and begin when it has ended
  the one before. On a CPU host and device are one.
- Each group has a stream on which its collectives run one after the other, in the order of their launch. With NCCL one
  begins when the device has come to where it was launched, and who waits for it is the device. With Gloo it begins
  when the host launches it, and who waits is the host.
- Collectives of several groups on one wire share it evenly: while k of them transfer, each gets on at 1 / k of its
  speed. Latencies are not shared. NVLink, what a network interface sends and what it receives are wires of their own.
- All ranks are alike: none is late. Kernels of NCCL take nothing from computations, and packing takes no time.

The record says who waits when, so that a layer's forward begins when its parameters have arrived.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.events import Compute, Event, Launch, Wait
from benchmarks.scale.networks import Cost, Network, Wire

_NOTHING_LEFT = 1e-12
"""Seconds of a transfer that are rounding."""

Rates = Mapping[str, float]
"""Seconds that a byte of parameters takes."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What computes.

    Args:
        seconds_per_byte: By kind of computation.
        host_computes: Whether the host is what computes, as on a CPU.
        launch_seconds: What the host needs for each launch.
    """

    seconds_per_byte: Rates
    host_computes: bool = False
    launch_seconds: float = 0.0

    def seconds(self, compute: Compute) -> float:
        return self.seconds_per_byte[compute.kind] * compute.nbytes


def accelerator(itemsize: int, *, updates: bool = True, launch_seconds: float = 0.0) -> Machine:
    """The GPU of ``constants.py``: 2 operations a parameter and token forward, 4 backward.

    Args:
        itemsize: Bytes of a parameter's element.
        updates: Whether the optimizer takes time: AdamW's fp32 accesses at the memory's bandwidth.
        launch_seconds: What the host needs for each launch.
    """
    forward = 2 * constants.TOKENS_A_GPU / constants.FLOPS / itemsize
    update = 4 / itemsize * constants.UPDATE_ACCESSES / (constants.HBM_GBS * constants.GIGABYTE)
    rates: Rates = {"forward": forward, "backward": 2 * forward, "update": update if updates else 0.0}
    return Machine(seconds_per_byte=rates, launch_seconds=launch_seconds)


class Step(NamedTuple):
    """What a record, or a step of it, takes.

    Attributes:
        seconds: From its beginning to when host and device have ended.
        compute_seconds: In which the device computed.
        launches: Collectives and messages.
    """

    seconds: float
    compute_seconds: float
    launches: int

    @property
    def exposed_seconds(self) -> float:
        """In which the device did not compute: what nothing hid."""
        return self.seconds - self.compute_seconds

    def __sub__(self, other: "Step") -> "Step":
        return Step(
            self.seconds - other.seconds, self.compute_seconds - other.compute_seconds, self.launches - other.launches
        )


def replay(events: Iterable[Event], machine: Machine, networks: Mapping[str, Network]) -> Step:
    """Plays a record through.

    Args:
        events: What one rank does, in order. A wait for a launch that is not among them ends at once.
        machine: What computes.
        networks: What carries each group's collectives, by the group's name.

    Returns:
        The time to the end of the last event; collectives that nobody waited for may still run then.
    """
    rank = _Rank(machine, networks)
    for event in events:
        if isinstance(event, Compute):
            rank.compute(event)
        elif isinstance(event, Launch):
            rank.launch(event)
        else:
            rank.wait(event)
    return Step(max(rank.host, rank.device), rank.computed, rank.launches)


def steady_step(record: Callable[[int], Iterable[Event]], machine: Machine, networks: Mapping[str, Network]) -> Step:
    """One step of a training that has been running for a while.

    Args:
        record: Gives the record of so many steps. A collective of one step that the next waits for reaches into it, so
            that the first step is not like the others; the third is.
        machine: What computes.
        networks: What carries each group's collectives, by the group's name.
    """
    return replay(record(3), machine, networks) - replay(record(2), machine, networks)


def replay_phase(
    events: Iterable[Event], phase: str, machine: Machine, networks: Mapping[str, Network]
) -> tuple[Step, Sequence[Event]]:
    """Plays a record through up to the end of a phase.

    Args:
        events: What one rank does, in order; the phase is one stretch of it.
        phase: Its name, "step" for the settled ones.
        machine: What computes.
        networks: What carries each group's collectives, by the group's name.

    Returns:
        What the phase takes after all before it, and its events.

    Raises:
        ValueError: No event is of the phase.
    """
    played = list(events)
    places = [place for place, event in enumerate(played) if event.phase == phase]
    if not places:
        raise ValueError(f"Invalid phase: {phase!r}. Must be one of the record's.")
    first, last = places[0], places[-1] + 1
    before, until = (replay(played[:stop], machine, networks) for stop in (first, last))
    return until - before, played[first:last]


class _Rank:
    """Host, device, and the streams of one rank, in the middle of a record."""

    def __init__(self, machine: Machine, networks: Mapping[str, Network]) -> None:
        self.machine, self.networks = machine, networks
        self.host = self.device = self.computed = 0.0
        self.launches = 0
        # One for what hosts launch and one for what devices do: each is only ever asked for later and later times.
        self._wires = {True: _Wires(), False: _Wires()}
        self._launched_on: dict[int, tuple[_Wires, bool]] = {}

    def compute(self, event: Compute) -> None:
        seconds = self.machine.seconds(event)
        self.device = max(self.host, self.device) + seconds
        self.computed += seconds
        if self.machine.host_computes:
            self.host = self.device

    def launch(self, event: Launch) -> None:
        network = self.networks[event.group]
        self.host += self.machine.launch_seconds
        ready = self.host if network.blocks_host else max(self.host, self.device)
        wires = self._wires[network.blocks_host]
        # A stream for each direction: a rank that sends chunks to all receives theirs meanwhile.
        direction = event.kind if event.kind in ("send", "recv") else ""
        wires.launch(f"{event.group} {direction}", event.number, ready, network.cost(event.kind, event.nbytes))
        self._launched_on[event.number] = wires, network.blocks_host
        self.launches += 1

    def wait(self, event: Wait) -> None:
        if event.number not in self._launched_on:
            return
        wires, blocks_host = self._launched_on[event.number]
        end = wires.end_of(event.number)
        if blocks_host:
            self.host = max(self.host, end)
        if not blocks_host or self.machine.host_computes:
            self.device = max(self.device, end)
        if self.machine.host_computes:
            self.host = max(self.host, self.device)


class _Transfer:
    """A collective that has not ended; ``flows`` is when its latency is over, once it has begun."""

    def __init__(self, number: int, ready: float, cost: Cost) -> None:
        self.number, self.ready, self.latency, self.left = number, ready, cost.latency_seconds, cost.transfer_seconds
        self.wire: Wire = cost.wire
        self.flows = math.inf


class _Wires:
    """Streams of collectives that share wires.

    Launches come in the order of their times, and nobody asks for an end before all launches until then are known:
    whoever launches later has waited for it.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._streams: dict[str, deque[_Transfer]] = {}
        self._ends: dict[int, float] = {}

    def launch(self, stream: str, number: int, ready: float, cost: Cost) -> None:
        queue = self._streams.setdefault(stream, deque())
        queue.append(_Transfer(number, ready, cost))
        if len(queue) == 1:
            self._begin(queue[0])

    def end_of(self, number: int) -> float:
        while number not in self._ends:
            self._advance()
        return self._ends[number]

    def _begin(self, transfer: _Transfer) -> None:
        transfer.flows = max(self._now, transfer.ready) + transfer.latency

    def _advance(self) -> None:
        """To the next moment at which a latency or a transfer is over."""
        heads = [queue[0] for queue in self._streams.values() if queue]
        flowing = [head for head in heads if head.flows <= self._now]
        sharing = {wire: sum(head.wire == wire for head in flowing) for wire in {head.wire for head in flowing}}
        then = min(
            self._now + head.left * sharing[head.wire] if head.flows <= self._now else head.flows for head in heads
        )
        for head in flowing:
            head.left -= (then - self._now) / sharing[head.wire]
        self._now = then
        for queue in self._streams.values():
            if queue and queue[0].flows <= then and queue[0].left <= _NOTHING_LEFT:
                self._ends[queue.popleft().number] = then
                if queue:
                    self._begin(queue[0])
