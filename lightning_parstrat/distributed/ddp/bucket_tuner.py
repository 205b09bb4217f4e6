"""Finds the buckets of a DistributedDataParallel while it trains: measured, planned, tried, kept or taken back.

Every step of it is a step of the training. The procedure is :meth:`BucketTuner._tune`, from top to bottom; at each
``yield`` a step passes, and its times come back.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.cost_model import CostFit
from lightning_parstrat.core.tuning import (
    Caps,
    Decision,
    Problem,
    Timing,
    TuningPolicy,
    decide,
    noise,
    order_stability,
    reason_not_to_plan,
    typical,
    under_load,
)
from lightning_parstrat.core.tuning_report import Measured, TuningReport, bucket_times, gradient_times
from lightning_parstrat.distributed.comm.agreement import all_gather_object, broadcast_object
from lightning_parstrat.distributed.comm.calibration import all_reduce_buffers, all_reduce_cost
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.ddp.backward_clock import BackwardClock
from lightning_parstrat.distributed.ddp.plan_cache import PlanCache
from lightning_parstrat.distributed.ddp.reducer_buckets import DDPBuckets

T = TypeVar("T")
Steps = Generator[None, Timing, T]
"""Something that takes steps of the training, and comes to a result."""

_SETTLING_STEPS = 2
"""A new reducer has its final buckets from its second step on, and allocates them there."""

_SETTLING_STEPS_OF_STATIC_GRAPHS = 3


class TuningStopped(Exception):
    """Why buckets stay, or become again, what they are by default. Raised on all ranks alike."""


class TuningFault(Exception):
    """What some rank could not do. Raised on all ranks alike."""


class _Seen(NamedTuple):
    """What all ranks have seen of the default's buckets."""

    timing: Timing
    noise_seconds: float
    stability: float


class BucketTuner:
    """Tunes the buckets of one training. Every method is collective, unless it says otherwise.

    It takes 33 steps by default (at most), one all-reduce of 8 bytes per parameter, and measurements that send four
    times what a step does. While buckets change there is memory for gradients twice.

    Args:
        ddp: The wrapper, before its first step.
        policy: How to tune.
        control: Its group works on host memory.
        device: Where the gradients are.
        wire_dtype: What they travel in; None for their own dtype.
        cache: Where plans are kept; rank 0's is used.
        say: Told what was found, on all ranks.
        warn: Told what went wrong.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        policy: TuningPolicy,
        control: Collectives,
        device: torch.device,
        wire_dtype: torch.dtype | None,
        cache: PlanCache,
        say: Callable[[TuningReport], None],
        warn: Callable[[str], None],
    ) -> None:
        self._group = ddp.process_group
        self._policy = policy
        self._control = control
        self._device = device
        self._wire_dtype = wire_dtype
        self.cache = cache
        self._say = say
        self._warn = warn
        self._settling = _SETTLING_STEPS_OF_STATIC_GRAPHS if ddp.static_graph else _SETTLING_STEPS
        self._buckets = DDPBuckets(ddp)
        self._clock: BackwardClock | None = None
        self._step_seconds: list[float] = []
        self._measuring_seconds = 0.0
        reason = self._buckets.reason_not_to_change()
        if reason is not None:
            self._finish(TuningReport(verdict="not tuned", reason=reason, world_size=control.world_size))
            return
        self._clock = BackwardClock(self._buckets.parameters, device)
        self._procedure = self._tune()
        next(self._procedure)

    def begin_forward(self) -> None:
        """Call before every forward of a training step; changes buckets, where it is time for that."""
        if self._clock is None:
            return
        if self._clock.has_measured:
            self._advance(self._clock)
        if self._clock is not None:
            self._clock.begin_forward()

    def begin_backward(self) -> None:
        """Call before a backward that sends gradients. Not collective."""
        if self._clock is not None:
            self._clock.begin_backward()

    def end_backward(self) -> None:
        """Call after it. Not collective."""
        if self._clock is not None:
            self._clock.end_backward()

    def close(self) -> None:
        """Ends it, wherever it is; buckets stay what they are. Not collective."""
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def _advance(self, clock: BackwardClock) -> None:
        """Goes on to the next step. Whatever goes wrong, training goes on with the default's buckets."""
        try:
            if clock.backwards != 1:
                # Ranks send equally often, so that all come here.
                raise TuningStopped("a step has several backwards that send gradients")
            timing = clock.timing()
            self._step_seconds.append(timing.seconds)
            self._procedure.send(timing)
        except StopIteration as finished:
            self._finish(finished.value)
        except Exception as error:
            self._give_up(error)

    def _tune(self) -> Steps[TuningReport]:
        policy = self._policy
        yield from self._steps(self._settling)
        kept = self._broadcast(self._load)
        if kept is not None:
            probed = yield from self._probe(kept)
            if probed is not None:
                return probed

        measured = yield from self._steps(policy.tune_steps)
        seen = self._agree(measured)
        idle = self._measure_wire()
        reason = reason_not_to_plan(seen.stability, idle.spread)
        if reason is not None:
            raise TuningStopped(reason)
        problem = self._problem(seen.timing)
        cost = under_load(problem, idle.model, seen.timing.exposed_seconds)
        smallest_gain = max(policy.tune_tolerance * seen.timing.seconds, seen.noise_seconds)
        decision: Decision = self._broadcast(lambda: decide(problem, cost, seen.timing.seconds, smallest_gain))
        report = TuningReport(
            verdict=decision.verdict,
            reason=decision.reason,
            world_size=self._control.world_size,
            cost=cost,
            load=cost.seconds(2**20) / idle.model.seconds(2**20),
            spread=idle.spread,
            backward_seconds=seen.timing.backward_seconds,
            default=Measured(seen.timing.seconds, seen.timing.exposed_seconds),
            predicted_default_seconds=decision.default.exposed_seconds,
            predicted_planned_seconds=decision.planned.exposed_seconds,
            bound_seconds=decision.bound_seconds,
            default_buckets=bucket_times(problem, decision.default, cost),
            planned_buckets=bucket_times(problem, decision.planned, cost),
            gradients=gradient_times(problem.nbytes, problem.ready_seconds),
        )
        if decision.verdict == "tuned":
            report = yield from self._try(replace(report, caps=decision.planned.caps), measured)
        self._save(self._counted(report))
        return report

    def _try(self, report: TuningReport, by_default: list[Timing]) -> Steps[TuningReport]:
        """Planned, default, planned: in turns, so that what changes meanwhile changes both."""
        half = self._policy.tune_steps // 2
        planned = yield from self._steps_with(report.caps, half)
        by_default = [*by_default[-half:], *(yield from self._steps_with(None, half))]
        planned += yield from self._steps_with(report.caps, half)
        default, tuned = self._measured(by_default), self._measured(planned)
        report = replace(report, default=default, planned=tuned)
        gain = default.seconds - tuned.seconds
        if gain > self._policy.tune_tolerance * default.seconds:
            return replace(report, reason=f"the planned buckets gain {gain / default.seconds:.1%} of a step")
        self._adopt(None)
        reason = f"{report.reason} by the model, but tried out, the planned buckets gain {gain / default.seconds:.1%}"
        return replace(report, verdict="default is best", reason=reason, caps=None)

    def _probe(self, kept: TuningReport) -> Steps[TuningReport | None]:
        """A plan of an earlier training against the default; None where it is slower."""
        if kept.caps is None:
            return replace(kept, from_cache=True)
        half = self._policy.tune_steps // 2
        default = self._measured((yield from self._steps(half)))
        planned = self._measured((yield from self._steps_with(kept.caps, half)))
        if planned.seconds <= default.seconds:
            reason = f"the buckets of an earlier training gain {1 - planned.seconds / default.seconds:.1%} of a step"
            return replace(kept, default=default, planned=planned, reason=reason, from_cache=True)
        yield from self._steps_with(None, 0)
        return None

    def _load(self) -> TuningReport | None:
        try:
            return self.cache.load()
        except (OSError, ValueError) as error:
            self._warn(f"the plan in the cache is not used: {error}")
            return None

    def _save(self, report: TuningReport) -> None:
        if self._control.rank == 0:
            try:
                self.cache.save(report)
            except Exception as error:
                # The others are done with tuning by now, and would not hear of it.
                self._warn(f"the plan is not kept: {error}")

    def _steps(self, count: int) -> Steps[list[Timing]]:
        timings = []
        for _ in range(count):
            timings.append((yield))
        return timings

    def _steps_with(self, caps: Caps | None, count: int) -> Steps[list[Timing]]:
        """Steps with other buckets, once those have settled."""
        self._adopt(caps)
        yield from self._steps(self._settling)
        return (yield from self._steps(count))

    def _adopt(self, caps: Caps | None) -> None:
        self._everywhere(lambda: self._buckets.adopt(caps))

    def _problem(self, timing: Timing) -> Problem:
        buckets, ready = self._buckets, timing.ready_seconds
        return Problem(buckets.nbytes, ready, buckets.order(ready), lambda caps: buckets.assigned(caps, ready))

    def _agree(self, timings: Sequence[Timing]) -> _Seen:
        """The slowest rank's times; but what is exposed of the one that waits least for others to come."""
        usual = typical(timings)
        stability = order_stability([timing.ready_seconds for timing in timings])
        unsteady = noise([timing.seconds for timing in timings])
        scalars = [usual.seconds, usual.backward_seconds, -usual.exposed_seconds, -stability, unsteady]
        values = torch.tensor([*scalars, *usual.ready_seconds], dtype=torch.float64)
        self._control.all_reduce(values, op=dist.ReduceOp.MAX).wait()
        seconds, backward, exposed, stable, unsteady, *ready = values.tolist()
        return _Seen(Timing(seconds, backward, -exposed, tuple(ready)), unsteady, -stable)

    def _measured(self, timings: Sequence[Timing]) -> Measured:
        seen = self._agree(timings).timing
        return Measured(seen.seconds, seen.exposed_seconds)

    def _measure_wire(self) -> CostFit:
        began = time.perf_counter()
        dtype, nbytes = self._buckets.dtype, sum(self._buckets.nbytes)
        buffers = self._everywhere(lambda: all_reduce_buffers(self._device, dtype, self._wire_dtype or dtype, nbytes))
        fit = all_reduce_cost(self._group, self._control, buffers)
        self._measuring_seconds += time.perf_counter() - began
        return fit

    def _broadcast(self, ask: Callable[[], T]) -> T:
        """What rank 0 has found; what it could not do stops the tuning on all ranks."""
        told: Any = None
        failure = None
        if self._control.rank == 0:
            try:
                told = ask()
            except Exception as error:
                failure = repr(error)
        told, failure = broadcast_object((told, failure), self._control.group)
        if failure is not None:
            raise TuningFault(f"rank 0: {failure}")
        result: T = told
        return result

    def _everywhere(self, act: Callable[[], T]) -> T:
        """Does something on all ranks; where one cannot, all stop."""
        done: Any = None
        failure = None
        try:
            done = act()
        except Exception as error:
            failure = repr(error)
        failures = all_gather_object(failure, self._control.group)
        failed = [rank for rank, told in enumerate(failures) if told is not None]
        if failed:
            raise TuningFault(f"rank {failed[0]}: {failures[failed[0]]}")
        result: T = done
        return result

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, (TuningStopped, TuningFault))
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if not isinstance(error, TuningStopped):
            self._warn(f"buckets are not tuned: {reason}")
        if any(all_gather_object(not self._buckets.are_default, self._control.group)):
            try:
                self._adopt(None)
            except TuningFault as fault:
                # Those that were tried do no harm.
                self._warn(f"buckets stay as they were tried: {fault}")
        self._finish(TuningReport(verdict="not tuned", reason=reason, world_size=self._control.world_size))

    def _finish(self, report: TuningReport) -> None:
        self.close()
        self._say(self._counted(report))

    def _counted(self, report: TuningReport) -> TuningReport:
        """With how many steps it took, and how much longer those lasted than as many usual ones."""
        steps = self._step_seconds
        usual = min(steps) if report.default is None and steps else 0.0
        usual = report.default.seconds if report.default is not None else usual
        longer = sum(seconds - usual for seconds in steps) + self._measuring_seconds
        return replace(report, steps=len(steps), overhead_seconds=longer)
