"""A training of ``zero1_custom`` that ends without memory comes to its end, and its first error is seen."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import make_trainer, zero1

WIDTH = 3072
"""Of a parameter of 36 MiB: smaller ones malloc may have memory for."""


class Large(zoo.Zoo):
    def build(self) -> None:
        self.layers = nn.Sequential(nn.Linear(zoo.FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.layers(batch).pow(2).mean()


class Fills(Callback):
    """Leaves less memory than a parameter takes, and is the first to ask for more."""

    values: list[Tensor]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.values = [parameter.detach().clone() for parameter in module.parameters()]
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            taken = 1024 * int(status["VmSize"].split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2**21, resource.getrlimit(resource.RLIMIT_AS)[1]))
            torch.zeros(10 * WIDTH, WIDTH)


@contextmanager
def memory_given_back() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class NotesItsEnd(TorchCheckpointIO):
    """What a strategy's teardown calls last."""

    has_ended = False

    def teardown(self) -> None:
        self.has_ended = True


def closing(fails: bool) -> Any:
    error = torch.OutOfMemoryError("when it was closed")
    return patch.object(ShardedDataParallel, "close", side_effect=error) if fails else nullcontext()


def run_out(fails_again: bool) -> tuple[str, bool, bool, bool]:
    """The error; whether teardown has come to its end; whether parameters are as they were; and if they train again."""
    torch.manual_seed(0)
    module, fills, end = Large(), Fills(), NotesItsEnd()
    trainer = make_trainer(zero1(checkpoint_io=end), callbacks=[fills], limit_train_batches=4)
    with memory_given_back(), closing(fails_again), pytest.raises(RuntimeError) as raised:
        trainer.fit(module, zoo.loader(32, 4))
    kept = all(torch.equal(one, other) for one, other in zip(module.parameters(), fills.values, strict=True))
    make_trainer(zero1(), limit_train_batches=1).fit(module, zoo.loader(32, 4))
    trains = not any(torch.equal(one, other) for one, other in zip(module.parameters(), fills.values, strict=True))
    return str(raised.value), end.has_ended, kept, trains


@pytest.mark.slow
def test_the_first_error_is_seen(pool: RankPool) -> None:
    for fails_again in (False, True):
        for said, ended, kept, trains in pool.run(2, run_out, fails_again):
            assert f"allocate {4 * 10 * WIDTH**2} bytes" in said, said
            assert ended and kept and trains


def fail_at_the_end() -> tuple[str, bool]:
    end = NotesItsEnd()
    with closing(True), pytest.raises(torch.OutOfMemoryError) as raised:
        make_trainer(zero1(checkpoint_io=end)).fit(zoo.MLP(), zoo.loader(16, 4))
    return str(raised.value), end.has_ended


def test_an_error_of_the_end_itself_is_seen_too(pool: RankPool) -> None:
    assert pool.run(2, fail_at_the_end) == [("when it was closed", True)] * 2
