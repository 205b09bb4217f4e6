"""Tunes the buckets of a DistributedDataParallel while it trains: tries sizes, and keeps the best or the default.

No step is wasted: each is a step of the training. The procedure is :meth:`BucketTuner._tune`, a generator that reads
from top to bottom; each ``yield`` waits for one step of the training and returns its seconds.
"""

import statistics
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.tuning import Tried, TuningPolicy, TuningReport, fastest, sizes_to_try, verdict_on
from lightning_parstrat.distributed.comm.agreement import all_gather_object, all_or_none, from_first_rank
from lightning_parstrat.distributed.comm.clocks import clock_of
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.ddp.plan_cache import Plan, PlanCache
from lightning_parstrat.distributed.ddp.reducer_buckets import DDPBuckets

T = TypeVar("T")
Steps = Generator[None, float, T]
"""A part of the procedure: consumes steps of the training and returns a result."""

_SETTLING_STEPS = 2
"""A new reducer rebuilds its buckets after its first step, and allocates them in the second."""

_SETTLING_STEPS_OF_STATIC_GRAPHS = 3
"""One more: the first step of a static graph only records which gradients there are."""


class TuningStopped(Exception):
    """Ends the tuning with the default's buckets; the message says why. Raised on all ranks alike."""


class TuningFault(Exception):
    """Some rank failed at something; the message says which, and at what. Raised on all ranks alike."""


class BucketTuner:
    """Tunes the buckets of one training. Every method is collective, unless it says otherwise.

    It takes at most 63 steps by default, and for each size an all-reduce of 8 bytes and a message. While buckets
    change, gradients take twice their memory.

    Args:
        ddp: The wrapper, before its first step.
        policy: How to tune.
        control: Its group works on host memory.
        device: Device of the gradients.
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
        cache: PlanCache,
        say: Callable[[TuningReport], None],
        warn: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._control = control
        self._cache = cache
        self._say = say
        self._warn = warn
        self._settling = _SETTLING_STEPS_OF_STATIC_GRAPHS if ddp.static_graph else _SETTLING_STEPS
        self._buckets = DDPBuckets(ddp)
        self._steps_taken = 0
        self._step: _Step | None = None
        reason = self._buckets.reason_not_to_change()
        if reason is not None:
            self._finish(TuningReport(verdict="not tuned", reason=reason))
            return
        self._step = _Step(device)
        self._procedure = self._tune()
        # Up to its first `yield`: a generator accepts no value before.
        next(self._procedure)

    def begin_forward(self) -> None:
        """Call before every forward of a training step. May change the buckets."""
        if self._step is not None and self._step.has_ended:
            self._advance(self._step)
        if self._step is not None:
            self._step.begin_forward()

    def begin_backward(self) -> None:
        """Call before a backward that sends gradients. Not collective."""
        if self._step is not None:
            self._step.begin_backward()

    def end_backward(self) -> None:
        """Call after a backward. Not collective."""
        if self._step is not None:
            self._step.end_backward()

    def close(self) -> None:
        """Ends the tuning at any point; buckets stay as they are. Not collective."""
        self._step = None

    def _advance(self, step: "_Step") -> None:
        """Continues the procedure with the last step's time. On any error, training goes on with default buckets."""
        try:
            if step.backwards != 1:
                # All ranks raise this together: they send gradients equally often.
                raise TuningStopped("a step has several backwards that send gradients")
            self._steps_taken += 1
            self._procedure.send(step.seconds())
        except StopIteration as finished:
            self._finish(finished.value)
        except Exception as error:
            self._give_up(error)

    def _tune(self) -> Steps[TuningReport]:
        yield from self._steps(self._settling)
        kept = self._broadcast(self._load)
        if kept is not None:
            report = yield from self._probe(kept)
            if report is not None:
                return report
        sizes = sizes_to_try(self._buckets.nbytes, self._buckets.default_first)
        if not sizes:
            raise TuningStopped("all gradients fit into one small bucket")
        by_default = yield from self._steps(self._half)
        tried = [self._measured(None, by_default)]
        for size in sizes:
            tried.append(self._measured(size, (yield from self._steps_with(size))))
        report = yield from self._confirm(fastest(tried).cap, by_default)
        measured = {one.cap: one for one in (*tried, *report.tried)}
        self._save(Plan(report.caps))
        return replace(report, tried=tuple(measured.values()))

    @property
    def _half(self) -> int:
        return self._policy.tune_steps // 2

    def _confirm(self, size: int | None, by_default: list[float]) -> Steps[TuningReport]:
        """Measures a size, the default, and the size: in turns, so that whatever drifts meanwhile affects both."""
        by_size = yield from self._steps_with(size)
        by_default = by_default + (yield from self._steps_with(None))
        by_size += yield from self._steps_with(size)
        default, best = self._measured(None, by_default), self._measured(size, by_size)
        report = verdict_on(default, best, self._policy.tune_tolerance)
        if report.caps is None:
            self._adopt(None)
        return replace(report, tried=(default, best))

    def _probe(self, kept: Plan) -> Steps[TuningReport | None]:
        """Measures the size of an earlier training against the default; None where it is slower."""
        if kept.caps is None:
            reason = "no other size was faster in an earlier training"
            return TuningReport(verdict="default is best", reason=reason, from_cache=True)
        size = kept.caps[0]
        default = self._measured(None, (yield from self._steps(self._half)))
        again = self._measured(size, (yield from self._steps_with(size)))
        report = verdict_on(default, again, 0.0)
        if report.caps is not None:
            return replace(report, tried=(default, again), from_cache=True)
        # The default's buckets must have settled again before they are measured.
        self._adopt(None)
        yield from self._steps(self._settling)
        return None

    def _load(self) -> Plan | None:
        try:
            return self._cache.load()
        except (OSError, ValueError) as error:
            self._warn(f"the plan in the cache is not used: {error}")
            return None

    def _save(self, plan: Plan) -> None:
        if self._control.rank == 0:
            try:
                self._cache.save(plan)
            except Exception as error:
                # The other ranks have finished tuning: raised here, it would end the training on rank 0 alone.
                self._warn(f"the plan is not kept: {error}")

    def _steps(self, count: int) -> Steps[list[float]]:
        seconds = []
        for _ in range(count):
            seconds.append((yield))
        return seconds

    def _steps_with(self, size: int | None) -> Steps[list[float]]:
        """Steps with other buckets, once those have settled."""
        self._adopt(size)
        yield from self._steps(self._settling)
        return (yield from self._steps(self._half))

    def _adopt(self, size: int | None) -> None:
        self._everywhere(lambda: self._buckets.adopt(None if size is None else (size,)))

    def _measured(self, size: int | None, seconds: list[float]) -> Tried:
        """The median of the slowest rank: the same number on all, so that all decide alike."""
        slowest = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
        self._control.all_reduce(slowest, op=dist.ReduceOp.MAX).wait()
        return Tried(size, float(slowest))

    def _broadcast(self, ask: Callable[[], T]) -> T:
        """Rank 0's result, on all ranks; its failure stops the tuning on all of them."""
        return from_first_rank(ask, self._control.group, lambda said: TuningFault(f"rank 0: {said}"))

    def _everywhere(self, act: Callable[[], None]) -> None:
        """Does something on all ranks; where one fails, the tuning stops on all."""

        def fault(failed: dict[int, str]) -> TuningFault:
            rank, said = next(iter(failed.items()))
            return TuningFault(f"rank {rank}: {said}")

        all_or_none(act, self._control, fault)

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
        self._finish(TuningReport(verdict="not tuned", reason=reason))

    def _finish(self, report: TuningReport) -> None:
        self.close()
        self._say(replace(report, steps=self._steps_taken))


class _Step:
    """Times one step: from the start of its forward to the end of the backward that sends. Not collective."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._forward: Any = None
        self._end: Any = None
        self.backwards = 0

    def begin_forward(self) -> None:
        """Forgets the step before."""
        self._forward, self._end, self.backwards = self._clock.now(), None, 0

    def begin_backward(self) -> None:
        """Call when a backward begins that will send gradients."""
        self._end = None
        self.backwards += 1

    def end_backward(self) -> None:
        """Call when everything has arrived; does nothing after a backward that sends nothing."""
        if self.backwards:
            self._end = self._clock.now()

    @property
    def has_ended(self) -> bool:
        """Whether a backward that sends has ended since the last forward began."""
        return self._forward is not None and self._end is not None

    def seconds(self) -> float:
        """The last step's; waits for a GPU."""
        return self._clock.seconds(self._forward, self._end)
