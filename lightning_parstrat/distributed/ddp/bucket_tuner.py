"""Tunes the buckets of a DistributedDataParallel while it trains: tries sizes, and keeps the best or the default.

No step is wasted: each is a step of the training. The procedure is :meth:`BucketTuner._tune`, a generator that you can
read from top to bottom. Each ``yield`` waits for one step of the training and returns its seconds.
"""

import statistics
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.tuning import Tried, TuningPolicy, TuningReport, Verdict, fastest, sizes_to_try, verdict_on
from lightning_parstrat.distributed.comm.agreement import broadcast_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.ddp.reducers import Wrap, exchange_reducer
from lightning_parstrat.distributed.durable_files import written_durably

T = TypeVar("T")
Steps = Generator[None, float, T]
"""A part of the procedure: consumes steps of the training and returns a result."""

_SETTLING_STEPS = 2
"""A new reducer rebuilds its buckets after its first step, and allocates them in the second. A static one, later."""


class BucketTuner:
    """Tunes the buckets of one training. Every method is collective, unless its docstring says otherwise.

    Tuning takes at most 63 steps by default. For each size, it sends an all-reduce of 8 bytes and a message. While
    buckets change, gradients take twice their memory. It may be dropped at any point: then buckets stay.

    Args:
        ddp: The wrapper, before its first step. Its buckets are torch's default.
        sent: The parameters whose gradients it sends.
        wrap: Makes wrappers with other buckets.
        policy: How to tune.
        control: Its group works on host memory.
        device: Device of the gradients.
        kept: The file that keeps the size for later trainings. None keeps none. Rank 0's file is used.
        warn: Called with a message after an error.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        sent: Collection[Tensor],
        wrap: Wrap,
        policy: TuningPolicy,
        control: Collectives,
        device: torch.device,
        kept: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        self._ddp, self._sent, self._wrap, self._control, self._kept, self._warn = ddp, sent, wrap, control, kept, warn
        self._half, self._tolerance = policy.tune_steps // 2, policy.tune_tolerance
        self._settling = _SETTLING_STEPS + ddp.static_graph
        self._steps_taken = 0
        self._on_gpu = device.type == "cuda"
        # Times of the step, and how many of its backwards send.
        self._forward: Any = None
        self._end: Any = None
        self._backwards = 0
        self._procedure = self._tune()
        # Up to its first `yield`: a generator accepts no value before.
        next(self._procedure)

    def begin_forward(self) -> TuningReport | None:
        """Call before every forward of a training step. May change the buckets.

        Returns:
            The result, when the tuning has ended. Do not call it again.
        """
        report = None if self._end is None else self._advance()
        self._forward, self._end, self._backwards = self._now(), None, 0
        return report

    def begin_backward(self) -> None:
        """Call before a backward that sends gradients. Not collective."""
        self._end = None
        self._backwards += 1

    def end_backward(self) -> None:
        """Call after a backward. Not collective."""
        if self._backwards and self._forward is not None:
            self._end = self._now()

    def _advance(self) -> TuningReport | None:
        """Continues the procedure with the last step's time. After an error, default buckets are used."""
        if self._backwards != 1:
            # All ranks reach this together: they send gradients equally often.
            return self._give_up("a step has several backwards that send gradients")
        self._steps_taken += 1
        try:
            self._procedure.send(self._seconds())
        except StopIteration as finished:
            report: TuningReport = finished.value
            return replace(report, steps=self._steps_taken)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._warn(f"buckets are not tuned: {reason}")
            return self._give_up(reason)
        return None

    def _tune(self) -> Steps[TuningReport]:
        yield from self._steps(self._settling)
        kept = broadcast_object(self._load() if self._control.rank == 0 else None, self._control.group)
        if kept is not None:
            self._adopt(kept or None)
            verdict: Verdict = "tuned" if kept else "default is best"
            reason = "an earlier training has found it"
            return TuningReport(verdict=verdict, reason=reason, cap=kept or None, from_cache=True)
        sizes = sizes_to_try(sum(parameter.nbytes for parameter in self._sent))
        if not sizes:
            return TuningReport(verdict="not tuned", reason="all gradients fit into one small bucket")
        by_default = yield from self._steps(self._half)
        tried = [self._measured(None, by_default)]
        for size in sizes:
            tried.append(self._measured(size, (yield from self._steps_with(size))))
        # In alternation with the default: a drift of the machine affects both.
        best = fastest(tried).cap
        by_size = yield from self._steps_with(best)
        by_default += yield from self._steps_with(None)
        by_size += yield from self._steps_with(best)
        tried += [self._measured(None, by_default), self._measured(best, by_size)]
        report = verdict_on(tried[-2], tried[-1], self._tolerance)
        if report.cap is None:
            self._adopt(None)
        self._save(report.cap)
        return replace(report, tried=tuple({one.cap: one for one in tried}.values()))

    def _load(self) -> int | None:
        """The size that an earlier training has kept: bytes, or 0 for torch's default. If there is none, None."""
        try:
            return int(self._kept.read_text()) if self._kept is not None and self._kept.exists() else None
        except (OSError, ValueError) as error:
            self._warn(f"the plan in the cache is not used: {self._kept}: {error}")
            return None

    def _save(self, cap: int | None) -> None:
        if self._control.rank == 0 and self._kept is not None:
            try:
                with written_durably(self._kept) as temporary:
                    temporary.write_text(str(cap or 0))
            except OSError as error:
                # The other ranks have finished tuning. An error here would end the training on rank 0 alone.
                self._warn(f"the plan is not kept: {error}")

    def _steps(self, count: int) -> Steps[list[float]]:
        seconds = []
        for _ in range(count):
            seconds.append((yield))
        return seconds

    def _steps_with(self, size: int | None) -> Steps[list[float]]:
        """Steps with other buckets, after they have settled."""
        self._adopt(size)
        yield from self._steps(self._settling)
        return (yield from self._steps(self._half))

    def _adopt(self, size: int | None) -> None:
        """Gives the wrapper buckets of that size, or the default's. If one rank fails, the tuning stops on all."""
        # Some may be frozen by now. They are sent all the same.
        exchange_reducer(self._ddp, self._sent, self._wrap, size, self._control)

    def _measured(self, size: int | None, seconds: list[float]) -> Tried:
        """The median of the slowest rank. The number is the same on all ranks, so all decide alike."""
        slowest = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
        self._control.all_reduce(slowest, op=dist.ReduceOp.MAX).wait()
        return Tried(size, float(slowest))

    def _give_up(self, reason: str) -> TuningReport:
        # On all ranks if on any: some may have adopted buckets at which another failed.
        try:
            self._adopt(None)
        except RuntimeError as fault:
            # At worst it is slower: results do not depend on buckets.
            self._warn(f"the buckets that were being tried stay in use: {fault}")
        return TuningReport(verdict="not tuned", reason=reason, steps=self._steps_taken)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        # The host's clock would give the time when work was queued, not when it was done.
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self) -> float:
        """From the start of the last forward to the end of the backward that sent. On a GPU, it waits."""
        if not self._on_gpu:
            return float(self._end - self._forward)
        self._end.synchronize()
        return float(self._forward.elapsed_time(self._end)) / 1000
