"""What the tests of this folder train, on one rank or several, and what they measure of it."""

import gc
import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parstrat import ZeRO1Strategy, ZeRO3Strategy
from tests import devices
from tests.strategies.parity import looks_at_no_gradient, make_trainer, whole
from tests.strategies.zoo import OptimizerFactory, adamw


class Layers(LightningModule):
    """Inputs are made on the device: a copy to it would be the loader's wait, not the strategy's.

    Args:
        width: Of each layer.
        number: Of layers.
        rows: Of a batch.
        make_optimizer: Gets the parameters.
        weight: Makes the weight of a micro-batch's loss.
    """

    def __init__(
        self,
        width: int = 64,
        number: int = 4,
        rows: int = 8,
        make_optimizer: OptimizerFactory = adamw,
        weight: Callable[[torch.device], Any] | None = None,
    ) -> None:
        super().__init__()
        self.make_optimizer, self.rows, self.width, self.weight = make_optimizer, rows, width, weight
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator(self.device).manual_seed(100 * batch_idx + self.global_rank)
        dtype = next(self.parameters()).dtype
        inputs = torch.randn(self.rows, self.width, device=self.device, generator=generator, dtype=dtype)
        loss = (self.layers(inputs) - inputs).square().mean()
        return loss if self.weight is None else {"loss": loss, "loss_weight": self.weight(self.device)}

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def fit(module: LightningModule, strategy: Any, steps: int = 10, **arguments: Any) -> Trainer:
    trainer = make_trainer(strategy, use_distributed_sampler=False, **arguments)
    trainer.fit(module, DataLoader(torch.zeros(steps, 1), batch_size=1))
    return trainer


def parameters_on_host(module: nn.Module) -> list[Tensor]:
    """Collective where they are sharded."""
    return [whole(parameter.detach()).float().cpu() for parameter in module.parameters()]


def allocated() -> int:
    """Bytes of this process on the device, without garbage; 0 on CPU."""
    if devices.kind() == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@looks_at_no_gradient
class MostHeld(Callback):
    """Bytes on the device between steps and at most, after the steps that plan; 0 on CPU.

    Args:
        before: Those that were there.
    """

    first = 6

    def __init__(self, before: int) -> None:
        self.before = before
        self.held = self.peak = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if devices.kind() == "cuda" and batch_idx == self.first:
            self.held = torch.cuda.memory_allocated() - self.before
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if devices.kind() == "cuda":
            self.peak = torch.cuda.max_memory_allocated() - self.before


WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "Memcpy DtoH (Device -> Pageable)",
)
"""Calls in a trace, and copies, that the host waits in for the device."""
STEADY = "steady steps"


@looks_at_no_gradient
class HostWaits(Callback):
    """Counts what the host waits for in some micro-batches, after those that plan.

    Args:
        path: For the trace.
        refuses: Whether torch raises where it would wait.
        traces: Whether a profiler looks. Not on CPU where threads move gradients: it may not be stopped while they do.
        first: Micro-batch that is looked at first.
        last: And the first that is not.
    """

    def __init__(self, path: Path, refuses: bool, traces: bool, first: int = 8, last: int = 14) -> None:
        self.path, self.refuses, self.traces, self.first, self.last = path, refuses, traces, first, last
        self.found: Counter[str] | None = None if traces else Counter()
        self.launched = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        on_gpu = devices.kind() == "cuda"
        if not self.traces:
            return
        if batch_idx == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
            self.mark = torch.profiler.record_function(STEADY)
            self.mark.__enter__()
            if on_gpu and self.refuses:
                torch.cuda.set_sync_debug_mode("error")
        if batch_idx == self.last:
            self.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.found, self.launched = host_waits(json.loads(self.path.read_text()))

    def stop(self) -> None:
        if devices.kind() == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.mark.__exit__(None, None, None)
        self.profiler.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if devices.kind() == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def host_waits(trace: Any) -> tuple[Counter[str], int]:
    """What the host waited for within the steady steps of a trace, by name, and how many kernels it launched."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    (steady,) = [e for e in events if e["name"] == STEADY and e.get("cat") in ("user_annotation", "cpu_op")]
    began, ended = float(steady["ts"]), float(steady["ts"]) + float(steady["dur"])
    within = [event["name"] for event in events if began <= float(event["ts"]) <= ended]
    waits = Counter(name for name in within if name in WAITS)
    return waits, sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in within)


def waits_of(
    strategy: Any, path: Path, make_module: Callable[[], LightningModule], **arguments: Any
) -> tuple[Counter[str], int]:
    """Of a training; torch raises where it would wait, but under stock strategies, and in 16-mixed for its scaler."""
    refuses = isinstance(strategy, (ZeRO1Strategy, ZeRO3Strategy)) and "fp16" not in arguments
    waits = HostWaits(path, refuses, traces=strategy is None or devices.kind() == "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(make_module(), strategy, steps=16, callbacks=[waits], **arguments)
    assert waits.found is not None
    return waits.found, waits.launched


def check_waits(device: str, expected: Counter[str], found: Counter[str], launched: int) -> None:
    """The host waited for nothing beside what it waits for under a plain Trainer."""
    if device == "cpu":
        pytest.skip("the trainings have run, but a CPU has nothing to wait for")
    # A trace without kernels has seen nothing.
    assert launched > 0
    assert not found - expected, f"{found - expected} beside {expected} of a plain Trainer, in six micro-batches"
