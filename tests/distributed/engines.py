"""An engine without Lightning, and collectives that keep a log, for tests inside the pool's processes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel

Log = list[tuple[str, int]]


class _LoggedWork:
    def __init__(self, work: Work, log: Log, event: tuple[str, int]) -> None:
        self.work, self.log, self.event = work, log, event
        self.waited = False

    def wait(self) -> None:
        self.log.append((f"wait {self.event[0]}", self.event[1]))
        self.work.wait()
        self.waited = True

    def is_completed(self) -> bool:
        return self.waited


class LoggedCollectives(Collectives):
    """Passes everything on, and writes down what was launched and waited for, numbered in order of launch."""

    def __init__(self, group: dist.ProcessGroup, log: Log) -> None:
        super().__init__(group)
        self.inner = make_collectives(group, torch.device("cpu"))
        self.log = log
        self.launched = 0

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        return self._logged("reduce", self.inner.reduce_scatter(buffer, shard, bounds))

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return self._logged("gather", self.inner.all_gather(buffer, bounds))

    def _logged(self, kind: str, work: Work) -> Work:
        event = (kind, self.launched)
        self.launched += 1
        self.log.append((f"launch {kind}", event[1]))
        return _LoggedWork(work, self.log, event)


def make_engine(
    module: nn.Module, *optimizers: Optimizer, bucket_cap_mb: float = 1e-6, **policy: Any
) -> ShardedDataParallel:
    """By default a bucket for each parameter."""
    return ShardedDataParallel(
        module, optimizers, ShardingPolicy(bucket_cap_mb=bucket_cap_mb, **policy), process_groups()
    )


def log_reductions(engine: ShardedDataParallel, log: Log) -> None:
    engine.reducer.collectives = LoggedCollectives(engine.reducer.collectives.group, log)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, weight_decay=0.1)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 21), nn.Tanh(), nn.Linear(21, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def squared_error(module: nn.Module, number: int, shape: tuple[int, ...] = (4, 12), target: float = 0.3) -> Tensor:
    """On inputs that are drawn anew for each number, the same on all ranks."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (module(inputs.to(next(module.parameters()).dtype)).float() - target).pow(2).mean()


def backward(engine: ShardedDataParallel, loss: Tensor) -> None:
    engine.prepare_backward(loss)
    loss.backward()
    engine.end_backward()
