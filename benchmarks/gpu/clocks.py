"""What is read while a strategy trains: wall time, memory, launches, and where the host spends its time."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.namespace import lightning

# Not `perf_counter`, which stands still where other ranks are played.
_now = time.monotonic


def device_clock(device: torch.device) -> float:
    """Seconds, read when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _now()


class _Watch(lightning.Callback):
    """Looks at steps after the first few, which allocate and settle.

    It has no hook in which a strategy would have to show gradients, which costs communication.

    Args:
        warm_up: Steps before.
        steps: Steps that are looked at; one more is to follow.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            self.begin(trainer)
        elif batch_idx == self.warm_up + self.steps:
            self.end()

    def begin(self, trainer: Any) -> None:
        """Before the first step that is looked at."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last."""
        raise NotImplementedError


class StepTime(_Watch):
    """Mean seconds of a step, and on a GPU memory: at the peak of set-up, at the peak of a step, and between steps."""

    def __init__(self, warm_up: int, steps: int, device: torch.device) -> None:
        super().__init__(warm_up, steps)
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.found: dict[str, float] = {}
        self._before = 0
        if self._on_gpu:
            self._before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self, trainer: Any) -> None:
        if self._on_gpu:
            self.found["set_up_peak_allocated"] = torch.cuda.max_memory_allocated(self._device) - self._before
            self.found["set_up_peak_reserved"] = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._began = device_clock(self._device)

    def end(self) -> None:
        self.found["seconds"] = (device_clock(self._device) - self._began) / self.steps
        if self._on_gpu:
            self.found["peak_allocated"] = torch.cuda.max_memory_allocated(self._device) - self._before
            self.found["peak_reserved"] = torch.cuda.max_memory_reserved(self._device)
            self.found["held_allocated"] = torch.cuda.memory_allocated(self._device) - self._before


_COUNTED = "benchmark: the steps that are counted"


class Launches(_Watch):
    """What a step launches, by torch's profiler: on a GPU calls of CUDA, everywhere operators and collectives."""

    def __init__(self, warm_up: int, steps: int, device: torch.device) -> None:
        super().__init__(warm_up, steps)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._range = record_function(_COUNTED)
        self._device = device
        self.found: dict[str, float] = {}

    def begin(self, trainer: Any) -> None:
        device_clock(self._device)
        self._profile.start()
        self._range.__enter__()

    def end(self) -> None:
        self._range.__exit__(None, None, None)
        self._profile.stop()
        self.found = {name: number / self.steps for name, number in self._count().items()}

    def _count(self) -> dict[str, int]:
        events = [event for event in self._profile.events() or () if event.device_type == torch.autograd.DeviceType.CPU]
        marks = [event.time_range for event in events if event.name == _COUNTED]
        inside = [event for event in events if marks[0].start <= event.time_range.start <= marks[0].end]
        names = Counter(event.name for event in inside)

        def number(*parts: str) -> int:
            return sum(many for name, many in names.items() if name.startswith("cu") and any(p in name for p in parts))

        # Operators that others are made of would count several times.
        outermost = [e for e in inside if e.name.startswith("aten::") and not _is_within_operator(e)]
        found = {
            "operators": len(outermost),
            "collectives": sum(many for name, many in names.items() if name.startswith("c10d::")),
        }
        if self._device.type == "cuda":
            found |= {
                "kernels": number("LaunchKernel", "GraphLaunch"),
                "copies": number("Memcpy"),
                "fills": number("Memset"),
                "host_waits": number("Synchronize"),
                "allocations": number("Malloc", "Free", "HostAlloc"),
            }
        return found


def _is_within_operator(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return True
        parent = parent.cpu_parent
    return False


class Operators(_Watch):
    """What a step calls, in the main thread and in backward: for processes in which other threads do work, too.

    torch's profiler may crash a process whose threads begin and end something while it stops.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        super().__init__(warm_up, steps)
        self._mode = _CountingMode()
        self.found: dict[str, float] = {}

    def begin(self, trainer: Any) -> None:
        self._mode.__enter__()

    def end(self) -> None:
        self._mode.__exit__(None, None, None)
        collectives = sum(number for name, number in self._mode.counted.items() if name.startswith("c10d::"))
        operators = sum(number for name, number in self._mode.counted.items() if name.startswith("aten::"))
        self.found = {"operators": operators / self.steps, "collectives": collectives / self.steps}


class _CountingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.name()] += 1
        return func(*args, **(kwargs or {}))


class HostTime(_Watch):
    """Where the host spends a step: seconds of each phase without those within it, by its clock alone.

    Forward, backward and the optimizer's step are Lightning's calls of the strategy. Of ``zero1_custom``, packing a
    bucket and launching its reduction is "pack"; agreeing on what came and waiting for it, "settle".
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        super().__init__(warm_up, steps)
        self._phases = _Phases()
        self._replaced = contextlib.ExitStack()
        self.found: dict[str, float] = {}

    def begin(self, trainer: Any) -> None:
        strategy = trainer.strategy
        for name, phase in (("training_step", "forward"), ("backward", "backward"), ("optimizer_step", "step")):
            timed = self._phases.timed(phase, getattr(strategy, name))
            self._replaced.enter_context(mock.patch.object(strategy, name, timed))
        for owner, name, phase in _ours(strategy):
            timed = self._phases.timed(phase, getattr(owner, name))
            self._replaced.enter_context(mock.patch.object(owner, name, timed))
        self._began = _now()

    def end(self) -> None:
        whole = _now() - self._began
        self._replaced.close()
        self.found = {phase: seconds / self.steps for phase, seconds in self._phases.seconds.items()}
        self.found["whole"] = whole / self.steps


def _ours(strategy: Any) -> Iterator[tuple[Any, str, str]]:
    """What of the engine is one of the phases: the object, the method, and the phase."""
    engine = getattr(strategy, "_engine", None)
    if engine is not None:
        yield engine.reducer, "_launch", "pack"
        yield engine.reducer, "end_backward", "settle"
        yield engine.reducer, "finish", "settle"


class _Phases:
    """Exclusive times. A backward's hooks run on another thread, but while the first one waits for it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within: list[float] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                inclusive = _now() - began
                self.seconds[phase] = self.seconds.get(phase, 0.0) + inclusive - self._within.pop()
                if self._within:
                    self._within[-1] += inclusive

        return call
