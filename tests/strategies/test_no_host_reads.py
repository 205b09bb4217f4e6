"""A steady step reads nothing back to the host, where a GPU would be waited for: seen on CPU, with its collectives."""

import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parstrat import GradNormMonitor, ZeRO1Strategy
from lightning_parstrat.distributed.comm.backends import NativeCollectives
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.parity import looks_at_no_gradient, make_trainer, zero1

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"}
METHODS = ("tolist", "numpy", "cpu")
ALLOWED = (
    # Adam's counts of steps, which it keeps on the host.
    "/torch/optim/",
    # The one message a step, which is sent from the host.
    "/comm/control_messages.py",
    # Loaders and samplers.
    "/torch/utils/data/",
)


class HostReads(TorchDispatchMode):
    """Notes who has the host look at a tensor's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in READS:
            self.note(func._schema.name)
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        frame, stack = sys._getframe(2), []
        while frame is not None:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        if not any(allowed in line for line in stack for allowed in ALLOWED):
            ours = [line for line in stack if "lightning" in line or "/tests/" in line]
            self.found.append(f"{what}: {' < '.join(ours[:4])}")

    def noting(self, name: str) -> Any:
        method = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return method(*args, **kwargs)

        return patch.object(Tensor, name, call)


@looks_at_no_gradient
class Watch(Callback):
    """From the sixth batch to the tenth: two windows of two, or four steps."""

    def __init__(self) -> None:
        self.reads = HostReads()
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.steps.append(trainer.global_step)
            self.watching = ExitStack()
            for one in (*map(self.reads.noting, METHODS), self.reads):
                self.watching.enter_context(one)
        if batch_idx == 9:
            self.watching.close()
            self.steps.append(trainer.global_step)


class Native(ZeRO1Strategy):
    """By the collectives of GPUs."""

    def _shard(self, optimizers: list[Optimizer]) -> None:
        super()._shard(optimizers)
        for mover in (self._engine.gatherer, self._engine.reducer):
            mover.collectives = NativeCollectives(mover.collectives.group)


class Weighted(zoo.MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.compute_loss(batch), "loss_weight": 1.0 + batch_idx + dist.get_rank()}


class Sixteen(zoo.MLP):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch.to(self.net[0].weight.dtype))


@looks_at_no_gradient
class ReadsNorm(zoo.MLP):
    """What the test must find."""

    def on_train_batch_end(self, *_: Any) -> None:
        float(self.trainer.strategy.grad_norm)


CLIP = {"gradient_clip_val": 0.1}
CASES: dict[str, tuple[type[zoo.Zoo], dict[str, Any], dict[str, Any]]] = {
    "clipping": (zoo.MLP, CLIP, {}),
    "clipping of all, by the maximum": (zoo.MLP, CLIP, {"clip_scope": "global", "norm_type": "inf"}),
    "accumulation": (zoo.MLP, {**CLIP, "accumulate_grad_batches": 2}, {}),
    "bf16-mixed": (zoo.MLP, {**CLIP, "precision": "bf16-mixed"}, {}),
    "bf16-mixed, in bf16 on the wire": (
        zoo.MLP,
        {**CLIP, "precision": "bf16-mixed"},
        {"comm_dtype": "bf16", "gather_dtype": "bf16"},
    ),
    "bf16-true, master weights": (Sixteen, {**CLIP, "precision": "bf16-true"}, {"master_weights": True}),
    "token weights": (Weighted, {**CLIP, "accumulate_grad_batches": 2}, {}),
    "whole parameters": (zoo.MLP, CLIP, {"partition": "parameter"}),
    "norms are monitored": (zoo.MLP, {"callbacks": [GradNormMonitor]}, {}),
}


def host_reads(make: type[zoo.Zoo], trainer: dict[str, Any], strategy: dict[str, Any]) -> tuple[list[str], list[int]]:
    torch.manual_seed(0)
    watch, ranks = Watch(), dist.get_world_size()
    chosen = zero1(Native, bucket_cap_mb=1e-3, max_inflight_buckets=4, **strategy)
    module = make()
    callbacks = [watch, *(callback() for callback in trainer.pop("callbacks", []))]
    make_trainer(chosen, callbacks=callbacks, **trainer).fit(
        module, zoo.loader(40 * ranks, 4, rank=dist.get_rank(), world_size=ranks)
    )
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    return watch.reads.found, watch.steps


QUICK = ("clipping", "bf16-true, master weights", "token weights")


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, CASES))
def test_a_steady_step_reads_nothing_back(pool: RankPool, name: str) -> None:
    for found, (before, after) in pool.run(2, host_reads, *CASES[name]):
        assert found == []
        assert after - before == 4 / CASES[name][1].get("accumulate_grad_batches", 1)


def test_16_mixed_waits_as_torch_does(pool: RankPool) -> None:
    """Once a step, where torch's scaler asks as well: was anything infinite on a device? Here there is one."""
    for found, (before, after) in pool.run(2, host_reads, zoo.MLP, {**CLIP, "fp16": True}, {}):
        assert after - before == len(found) == 4
        assert all("gradients/precision.py" in one.partition(" < ")[0] for one in found)


def test_who_reads_a_norm_is_found(pool: RankPool) -> None:
    for found, _ in pool.run(2, host_reads, ReadsNorm, CLIP, {}):
        assert found and all("test_no_host_reads" in one for one in found)
