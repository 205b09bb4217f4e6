"""Lines for the log: the sharding of a training, and at its end the cost of a step."""

import resource
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_parstrat.core.layout import owned_bytes, parameter_bytes
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.collectives import Traffic
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.engine.state_size import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.engine.stepping import sharding_of

_STEPS_THAT_SETTLE = 3
"""The first steps allocate and plan buckets. They do not count."""

_FEWEST_STEPS = 20
"""Medians of fewer steps are not reliable."""

_STEPS_KEPT = 1000

BF16_SAVES_NOTHING = (
    "comm_dtype='bf16' is left out. Between these ranks gradients are summed in fp32 around a ring, which sends as"
    " many bytes as without it."
)


def describe(flag: str, engine: ShardedDataParallel, observers: Sequence[str]) -> str:
    """The line for the start of a fit. It names sharded state, unsharded state with reasons, and readers of gradients.

    Args:
        flag: The strategy's name.
        engine: The sharding.
        observers: Code that may read gradients. Empty if gradients are hidden.

    Returns:
        The line. Empty if there is nothing to train.
    """
    parameters = sum(slot.place.numel for slot in engine.slots.values())
    parts = [_sharded(engine, parameters)] if parameters else []
    for optimizer, decision in zip(engine.optimizers, engine.decisions, strict=True):
        if decision.partition is None:
            parts.append(
                f"{type(optimizer).__name__} is not sharded, as {decision.reason}: every rank keeps all of its state,"
                f" as under `ddp`. {decision.remedy}".rstrip()
            )
    if parameters and observers:
        parts.append(
            f"Gradients are gathered in every step, as {named(observers)} may read them"
            " (`expose_gradients=False` saves that if not)."
        )
    return f"{flag}: {' '.join(parts)}" if parts else ""


def named(observers: Sequence[str]) -> str:
    """The first two observers."""
    return ", ".join(observers[:2]) + (" and others" if len(observers) > 2 else "")


def _sharded(engine: ShardedDataParallel, parameters: int) -> str:
    collectives, place = engine.reducer.collectives, engine.reducer.collectives.place
    groups = f" in {place.copies} shard groups" if place.copies > 1 else ""
    line = f"{_count(parameters)} over {counted(collectives.world_size, 'rank')}{groups}"
    state = _state_bytes(engine)
    if state is None:
        layouts = [bucket.layout for bucket in engine.buckets]
        share = owned_bytes(layouts, place.shard) / max(parameter_bytes(layouts), 1)
        line = f"{line}, optimizer state of {share:.0%} of them on this one"
    elif not any(state):
        # For example SGD without momentum.
        line = f"{line}, no optimizer state to shard"
    else:
        instead = f" instead of {_size(state[0])}" if collectives.world_size > place.copies else ""
        line = f"{line}, optimizer state {_size(state[1])} per rank{instead}"
    masters = sum(0 if bucket.master is None else bucket.master.nbytes for bucket in engine.buckets)
    return f"{line}, fp32 master weights {_size(masters)} per rank." if masters else f"{line}."


def _state_bytes(engine: ShardedDataParallel) -> tuple[float, float] | None:
    """Bytes of optimizer state, unsharded and on this rank. If an optimizer's is unknown before its step, None."""
    unsharded = own = 0.0
    for optimizer in engine.sharded_optimizers:
        ratio = state_bytes_per_parameter_byte(optimizer)
        if ratio is None:
            return None
        for bucket in sharding_of(optimizer).buckets:
            # An optimizer keeps its state in the dtype that it steps.
            layouts = [bucket.layout._replace(itemsize=bucket.shard_dtype.itemsize)]
            unsharded += ratio * parameter_bytes(layouts)
            own += ratio * owned_bytes(layouts, bucket.place.shard)
    return unsharded, own


class _Step(NamedTuple):
    seconds: float
    waited_seconds: float
    bytes_sent: int


class StepMeter:
    """Time, waiting and traffic of the last steps, on this rank. Not collective. The host never waits for a GPU.

    Args:
        flag: The strategy's name.
        device: Device of the training.
    """

    def __init__(self, flag: str, device: torch.device) -> None:
        self._flag = flag
        self._device = device
        self._steps: deque[_Step] = deque(maxlen=_STEPS_KEPT)
        self._noted = 0
        self._last: tuple[int, float, float, int] | None = None

    def note(self, global_step: int, traffic: Traffic) -> None:
        """Call before each batch and at the end. A step lasts from one change of ``global_step`` to the next.

        Args:
            global_step: Number of optimizer steps so far.
            traffic: The bytes that this rank has sent so far, and its time of waiting.
        """
        sent = traffic.reduce_scatter_bytes + traffic.all_gather_bytes + traffic.all_reduce_bytes
        now = (global_step, time.perf_counter(), traffic.waited_seconds, sent)
        # Micro-batches of one accumulation window belong to one step.
        if self._last is not None and self._last[0] == global_step:
            return
        if self._last is not None:
            self._noted += 1
            if self._noted > _STEPS_THAT_SETTLE:
                self._steps.append(_Step(now[1] - self._last[1], now[2] - self._last[2], now[3] - self._last[3]))
        self._last = now

    def line(self) -> str | None:
        """Medians over the last steps, without the first few. None after a short training."""
        if len(self._steps) < _FEWEST_STEPS:
            return None
        seconds = statistics.median(step.seconds for step in self._steps)
        waited = statistics.median(step.waited_seconds for step in self._steps)
        sent = statistics.median(step.bytes_sent for step in self._steps)
        # On a GPU the streams wait, not the host. Timing them would need synchronization.
        exposed = "" if self._device.type == "cuda" else f", {_milliseconds(waited)} of it waiting for other ranks"
        return (
            f"{self._flag}: {_milliseconds(seconds)} per step (median of {len(self._steps)}){exposed};"
            f" {_size(sent)} sent per step and rank; peak memory {_size(self._peak_bytes())}{self._kind_of_memory()}"
        )

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # Linux counts it in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _kind_of_memory(self) -> str:
        return " allocated on the GPU" if self._device.type == "cuda" else " resident, everything included"


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name} parameters"
    return counted(number, "parameter")


def _size(number: float) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} bytes"
