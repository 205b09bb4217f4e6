"""The lines of a fit on rank 0: at its start what is sharded, and at its end the cost of a step."""

import json
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tuning import MEASURES
from lightning_parstrat.core.wording import amount, count_of, counted
from lightning_parstrat.distributed.comm.work import waited_seconds
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.engine.state import state_bytes_per_parameter_byte
from lightning_parstrat.strategies.measured import measured_for, memory_of, peak_bytes
from lightning_parstrat.strategies.parts import Part

_STEPS_THAT_SETTLE = 3
"""The first steps allocate and plan buckets. They do not count."""

_FEWEST_STEPS = 20
"""Means of fewer steps are not reliable."""

BF16_SAVES_NOTHING = (
    "comm_dtype='bf16' is left out. Between these ranks gradients are summed in fp32 around a ring, which sends as"
    " many bytes as without it."
)


class _Moment(NamedTuple):
    """The begin of a step. Seconds and bytes are counted from any time on, without those of validations."""

    global_step: int
    seconds: float
    loaded_seconds: float
    waited_seconds: float
    bytes_sent: float


class StepTimes(NamedTuple):
    """Means over steps of this rank: seconds of a step, shares of it, and bytes.

    Attributes:
        seconds: From the begin of a step to the begin of the next.
        loading: The share in which the host waits for the loader's batches.
        waiting: The share in which the host waits for other ranks. None if it cannot see that.
        sent: Bytes that this rank sends. None if the host cannot see that.
    """

    seconds: float
    loading: float
    waiting: float | None
    sent: float | None

    @classmethod
    def between(cls, first: _Moment, last: _Moment, sees_waiting: bool, sees_traffic: bool) -> "StepTimes":
        """The means over the steps between two moments."""
        steps, seconds, loaded, waited, sent = (after - before for before, after in zip(first, last, strict=True))
        return cls(
            seconds / steps,
            loaded / seconds,
            waited / seconds if sees_waiting else None,
            sent / steps if sees_traffic else None,
        )


class Report(Part):
    """Logs the lines of a fit, and measures time, waiting and traffic of the last steps on this rank.

    Not collective. The host never waits for a GPU.

    Args:
        strategy: The strategy that it is a part of.
        flag: The strategy's name.
        bytes_sent: Returns what this rank has sent. None if the host cannot see that.
        loaded_seconds: Returns how long it has waited for the loader's batches.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        flag: str,
        bytes_sent: Callable[[], int | None],
        loaded_seconds: Callable[[], float],
    ) -> None:
        super().__init__(strategy)
        self._flag, self._bytes_sent, self._loaded_seconds = flag, bytes_sent, loaded_seconds
        self.chosen: Mapping[str, Any] = {}
        """The measurement of ``lightning-parstrat tune``, if its choice is trained."""
        self._said: set[str] = set()
        self._steps = 0
        self._first: _Moment | None = None
        """The begin of the first step that counts."""
        self._last: _Moment | None = None
        self._paused_at: _Moment | None = None
        self._left_out = _Moment(0, 0.0, 0.0, 0.0, 0.0)
        """Seconds and bytes of validations."""

    def say(self, line: str, warns: bool = False) -> None:
        """Logs a line, unless it has been logged. A tuner's short training would log the same lines before."""
        if line and line not in self._said:
            self._said.add(line)
            (rank_zero_warn if warns else rank_zero_info)(f"{self._flag}: {line}")

    @override
    def on_train_start(self) -> None:
        """Begins to measure."""
        self._steps, self._first, self._last, self._paused_at = 0, None, None, None
        if self.chosen:
            self._say_choice()

    def _say_choice(self) -> None:
        chosen = self.chosen
        self.say(f"chosen by {chosen['path']}, measured {chosen['measured']}: {chosen['seconds']:.3f} s per step.")
        now = measured_for(self._module, self._strategy)
        differing = [f"{key} {now[key]}, not {chosen[key]}" for key in now if chosen.get(key) != now[key]]
        if differing:
            self.say(
                f"{chosen['path']} was measured for another training: here there are {', '.join(differing)}. Run"
                " `lightning-parstrat tune` again.",
                True,
            )

    def note_step(self) -> None:
        """Call before each batch, and at the end. A step lasts from one change of ``global_step`` to the next."""
        # Micro-batches of one accumulation window belong to one step.
        if self._last is None or self._last.global_step != self._trainer.global_step:
            self._last, self._steps = self._now(), self._steps + 1
            if self._steps == 1 + _STEPS_THAT_SETTLE:
                self._first = self._last

    def _now(self) -> _Moment:
        loaded, sent = self._loaded_seconds(), self._bytes_sent() or 0
        now = (self._trainer.global_step, time.perf_counter(), loaded, waited_seconds(), sent)
        return _Moment(*map(operator.sub, now, self._left_out))

    def pause(self) -> None:
        """Call when a validation begins. It does not count until :meth:`resume`."""
        self._paused_at = self._now()

    def resume(self) -> None:
        """Call when a validation has ended."""
        if self._paused_at is not None:
            gone = map(operator.sub, self._now(), self._paused_at)
            self._left_out = _Moment(*map(operator.add, self._left_out, gone))
            self._paused_at = None

    @override
    def on_train_end(self) -> None:
        """Logs means over the steps, without the first few. Nothing after a short training."""
        self.note_step()
        first, last, strategy = self._first, self._last, self._strategy
        if first is None or last is None or last.global_step - first.global_step < _FEWEST_STEPS:
            return
        sees_traffic = self._bytes_sent() is not None and strategy.world_size > 1
        # On a GPU the streams wait, not the host. Timing them would need synchronization.
        times = StepTimes.between(first, last, sees_traffic and strategy.root_device.type != "cuda", sees_traffic)
        rank_zero_info(f"{self._flag}: {line_of_steps(times, strategy.world_size, strategy.root_device)}")
        if (target := os.environ.get(MEASURES)) and strategy.is_global_zero:
            known = measured_for(self._module, strategy) | memory_of(self._module, strategy)
            Path(target).write_text(json.dumps(times._asdict() | known))

    @override
    def teardown(self) -> None:
        """Lets the next training log its lines."""
        self._said.clear()


def line_of_steps(times: StepTimes, ranks: int, device: torch.device) -> str:
    """The means of steps: time, its shares with the speed-up that follows, bytes, and the peak memory.

    Computing takes what is left of a step. One device would compute, and load, as long for each rank's share of the
    step. So N ranks are N times as fast, by the part of a step in which they do not wait for others.

    Args:
        times: The means.
        ranks: The number of ranks.
        device: The device of the training.
    """
    seconds, loading, waiting, sent = times
    line = f"{seconds:.2f} s per step" if seconds >= 1 else f"{1000 * seconds:.1f} ms per step"
    line = f"{line}, {loading:.0%} loading"
    if waiting is not None:
        computing = max(0.0, 1 - loading - waiting)
        line = (
            f"{line}, {computing:.0%} computing, {waiting:.0%} waiting ({ranks * (1 - waiting):.2g} times one device)"
        )
    if sent is not None:
        line = f"{line}; {amount(sent)} sent per rank"
    return f"{line}; peak {'GPU ' if device.type == 'cuda' else ''}memory {amount(peak_bytes(device))}"


def _line(
    parameters: int, ranks: int, what: str, own: float, whole: float, leaves_out_state: bool, copies: int = 1
) -> str:
    """The first line of a fit: what is sharded, and the memory of it on this rank and without sharding.

    Args:
        parameters: The number of elements that are trained.
        ranks: The number of ranks.
        what: What is divided among the ranks. Empty if nothing is.
        own: Its bytes on this rank.
        whole: Its bytes on a rank under `ddp`.
        leaves_out_state: Whether the bytes are without optimizer state, whose size is not known before a step.
        copies: How many groups of ranks hold it.
    """
    groups = f" in {copies} shard groups" if copies > 1 else ""
    plural = "parameter" if parameters == 1 else "parameters"
    start = f"{count_of(parameters)} {plural} on {counted(ranks, 'rank')}{groups}"
    rest = " + optimizer state" if leaves_out_state else ""
    if not own and not whole:
        return f"{start}; {what} sharded" if leaves_out_state else f"{start}; no optimizer state: nothing to shard"
    if not what:
        return f"{start}; nothing is sharded: {amount(own)} each{rest}"
    instead = f" instead of {amount(whole)}" if ranks > copies and whole else ""
    return f"{start}; {what} sharded: {amount(own)} each{instead}{rest}"


def sharded_by(engine: ShardedDataParallel, groups: int = 1) -> str:
    """The first line of a fit whose optimizers an engine has sharded. Empty if it has sharded none.

    Args:
        engine: The engine.
        groups: How many groups of ranks train alone.
    """
    if not engine.slots:
        return ""
    collectives = engine.reducer.collectives
    own, whole, leaves_out_state = 0.0, 0.0, False
    slots = list(engine.slots.values())
    owned = {slot: 0 if slot.shard is None else slot.shard.numel() for slot in slots}
    for sharding in engine.shardings.values():
        ratio = state_bytes_per_parameter_byte(sharding.optimizer)
        leaves_out_state |= ratio is None
        for slot in sharding.slots.values():
            # An optimizer keeps its state in the dtype that it steps. Under `ddp`, that is the parameter's own.
            whole += (ratio or 0.0) * slot.bucket.dtype.itemsize * slot.place.numel
            own += (ratio or 0.0) * slot.bucket.shard_dtype.itemsize * owned[slot]
    what = ["optimizer state"] if whole or (leaves_out_state and not engine.reducer.shards_accumulation) else []
    if engine.reducer.shards_accumulation:
        what.insert(0, "gradients")
        whole += sum(slot.parameter.nbytes for slot in slots)
        own += sum(slot.bucket.sum_dtype.itemsize * owned[slot] for slot in slots)
    if any(bucket.master is not None for bucket in engine.buckets):
        what.append("masters")
        own += sum(bucket.master.nbytes for bucket in engine.buckets if bucket.master is not None)
    parameters = sum(slot.place.numel for slot in slots)
    ranks, copies = collectives.world_size * groups, collectives.place.copies * groups
    return _line(parameters, ranks, ", ".join(what), own, whole, leaves_out_state, copies)


def line_of_training(
    parameters: Sequence[Tensor],
    optimizers: Sequence[Optimizer],
    ranks: int,
    own_numel: Callable[[Tensor], int] | None = None,
    copies: int = 1,
    shards_gradients: bool = True,
) -> str:
    """The first line of a fit that divides parameters, gradients and optimizer state, or none of them.

    Args:
        parameters: All parameters.
        optimizers: The optimizers, which step parameters.
        ranks: The number of ranks.
        own_numel: How many elements of a parameter this rank has. None for all.
        copies: How many groups of ranks hold all of it.
        shards_gradients: Whether gradients are divided, too. Otherwise the bytes are without them.
    """
    ratios = [state_bytes_per_parameter_byte(optimizer) for optimizer in optimizers]

    def total(numel: Callable[[Tensor], int]) -> float:
        size = {parameter: numel(parameter) * parameter.element_size() for parameter in parameters}
        of_optimizers = [
            (ratio or 0.0) * size.get(one, 0)
            for ratio, optimizer in zip(ratios, optimizers, strict=True)
            for group in optimizer.param_groups
            for one in group["params"]
        ]
        times = 2 if shards_gradients else 1
        return sum((times if one.requires_grad else 1) * size[one] for one in parameters) + sum(of_optimizers)

    count = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    what = "weights, gradients" if shards_gradients else "weights"
    what += "" if None in ratios else ", optimizer state"
    own = total(own_numel or Tensor.numel)
    whole = total(Tensor.numel) if own_numel else own
    return _line(count, ranks, what if own_numel else "", own, whole, None in ratios, copies)


def not_sharded(engine: ShardedDataParallel) -> str:
    """Which optimizers are not sharded, with the reasons and what to do. Empty if all are."""
    return " ".join(
        f"{type(optimizer).__name__} is not sharded, as {decision.reason}: every rank keeps all of its state, as under"
        " `ddp`. Optimizers that step each parameter by its own gradient are sharded, such as torch.optim.AdamW."
        for optimizer, decision in zip(engine.optimizers, engine.decisions, strict=True)
        if decision.partition is None
    )


def held_elsewhere(engine: ShardedDataParallel) -> str:
    """Which parameters' earlier memory a program holds. Empty if there are none."""
    if not engine.held_elsewhere:
        return ""
    return (
        f"a program holds the memory of {named(engine.held_elsewhere)} from before the training, such as by a list of"
        " `p.data` or a `state_dict()`. That keeps the old values. Read parameters from the module, or hold such memory"
        " after the first step only."
    )


def named(found: Sequence[str]) -> str:
    """The first two of some names."""
    return ", ".join(found[:2]) + (" and others" if len(found) > 2 else "")
