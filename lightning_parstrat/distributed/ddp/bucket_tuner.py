"""Tunes the buckets of a DistributedDataParallel while it trains: measures, plans, tries, and keeps or reverts.

No step is wasted: each is a step of the training. The procedure is :meth:`BucketTuner._tune`, a generator that reads
from top to bottom; each ``yield`` waits for one step of the training and returns its times.
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
"""A part of the procedure: consumes steps of the training and returns a result."""

_SETTLING_STEPS = 2
"""A new reducer rebuilds its buckets after its first step, and allocates them in the second."""

_SETTLING_STEPS_OF_STATIC_GRAPHS = 3
"""One more: the first step of a static graph only records which gradients there are."""


class TuningStopped(Exception):
    """Ends the tuning with the default's buckets; the message says why. Raised on all ranks alike."""


class TuningFault(Exception):
    """Some rank failed at something; the message says which, and at what. Raised on all ranks alike."""


class _Seen(NamedTuple):
    """What all ranks have measured with the default's buckets."""

    timing: Timing
    noise_seconds: float
    stability: float


class BucketTuner:
    """Tunes the buckets of one training. Every method is collective, unless it says otherwise.

    It takes at most 33 steps by default, one all-reduce of 8 bytes per parameter, and measurements that send four times
    the bytes of a step. While buckets change, gradients take twice their memory.

    Args:
        ddp: The wrapper, before its first step.
        policy: How to tune.
        control: Its group works on host memory.
        device: Device of the gradients.
        wire_dtype: Dtype in which they travel; None for their own.
        cache: Where plans are kept; rank 0's is used.
        say: Called with the report, on all ranks.
        warn: Called with a message when something went wrong.
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
        # Up to its first `yield`: a generator accepts no value before.
        next(self._procedure)

    def begin_forward(self) -> None:
        """Call before every forward of a training step. May change the buckets."""
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
        """Call after a backward. Not collective."""
        if self._clock is not None:
            self._clock.end_backward()

    def close(self) -> None:
        """Ends the tuning at any point; buckets stay as they are. Not collective."""
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def _advance(self, clock: BackwardClock) -> None:
        """Continues the procedure with the last step's times. On any error, training goes on with default buckets."""
        try:
            if clock.backwards != 1:
                # All ranks raise this together: they send gradients equally often.
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
        # A trial could not distinguish a gain below the measurement's noise from none.
        smallest_gain = max(policy.tune_tolerance * seen.timing.seconds, seen.noise_seconds)
        # Rank 0 decides for all: ranks with different buckets would reduce different things, and hang.
        decision: Decision = self._broadcast(lambda: decide(problem, cost, seen.timing.seconds, smallest_gain))
        report = TuningReport(
            verdict=decision.verdict,
            reason=decision.reason,
            world_size=self._control.world_size,
            cost=cost,
            # Any size gives the same quotient: `under_load` scales latency and time per byte alike.
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
        """Measures planned, default, planned: in turns, so that whatever drifts meanwhile affects both."""
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
        reason = f"{report.reason}, but when tried, the planned buckets gain {gain / default.seconds:.1%}"
        return replace(report, verdict="default is best", reason=reason, caps=None)

    def _probe(self, kept: TuningReport) -> Steps[TuningReport | None]:
        """Measures the plan of an earlier training against the default; None where it is slower."""
        if kept.caps is None:
            return replace(kept, from_cache=True)
        half = self._policy.tune_steps // 2
        default = self._measured((yield from self._steps(half)))
        planned = self._measured((yield from self._steps_with(kept.caps, half)))
        if planned.seconds <= default.seconds:
            reason = f"the buckets of an earlier training gain {1 - planned.seconds / default.seconds:.1%} of a step"
            return replace(kept, default=default, planned=planned, reason=reason, from_cache=True)
        # The default's buckets must have settled again before they are measured for a new plan.
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
                # The other ranks have finished tuning: raised here, it would end the training on rank 0 alone.
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
        """The slowest rank's times, but the smallest exposed time: on other ranks it includes waiting for late ones."""
        usual = typical(timings)
        stability = order_stability([timing.ready_seconds for timing in timings])
        unsteady = noise([timing.seconds for timing in timings])
        # Negated where the smallest counts, so that one all-reduce by MAX is enough.
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
        # A rank that runs out of memory here must say so: the others would wait for it in the measurement.
        buffers = self._everywhere(lambda: all_reduce_buffers(self._device, dtype, self._wire_dtype or dtype, nbytes))
        fit = all_reduce_cost(self._group, self._control, buffers)
        self._measuring_seconds += time.perf_counter() - began
        return fit

    def _broadcast(self, ask: Callable[[], T]) -> T:
        """Rank 0's result, on all ranks; its failure stops the tuning on all of them."""
        answer: Any = None
        failure = None
        if self._control.rank == 0:
            try:
                answer = ask()
            except Exception as error:
                failure = repr(error)
        answer, failure = broadcast_object((answer, failure), self._control.group)
        if failure is not None:
            raise TuningFault(f"rank 0: {failure}")
        result: T = answer
        return result

    def _everywhere(self, act: Callable[[], T]) -> T:
        """Does something on all ranks; where one fails, the tuning stops on all."""
        done: Any = None
        failure = None
        try:
            done = act()
        except Exception as error:
            failure = repr(error)
        failures = all_gather_object(failure, self._control.group)
        failed = [rank for rank, error in enumerate(failures) if error is not None]
        if failed:
            raise TuningFault(f"rank {failed[0]}: {failures[failed[0]]}")
        result: T = done
        return result

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, (TuningStopped, TuningFault))
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if not isinstance(error, TuningStopped):
            self._warn(f"buckets are not tuned: {reason}")
        # By all ranks if by any: some may have adopted buckets at which another failed.
        if any(all_gather_object(not self._buckets.are_default, self._control.group)):
            try:
                self._adopt(None)
            except TuningFault as fault:
                # Only slower, at worst: results do not depend on buckets.
                self._warn(f"the buckets that were being tried stay in use: {fault}")
        self._finish(TuningReport(verdict="not tuned", reason=reason, world_size=self._control.world_size))

    def _finish(self, report: TuningReport) -> None:
        self.close()
        self._say(self._counted(report))

    def _counted(self, report: TuningReport) -> TuningReport:
        """The report with the number of steps, and how much longer these took than as many usual ones."""
        steps = self._step_seconds
        usual = min(steps) if report.default is None and steps else 0.0
        usual = report.default.seconds if report.default is not None else usual
        longer = sum(seconds - usual for seconds in steps) + self._measuring_seconds
        return replace(report, steps=len(steps), overhead_seconds=longer)
