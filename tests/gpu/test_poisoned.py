"""World size 1 by the path of several ranks: whoever reads what has not arrived waits for it, else it is NaN."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests import devices
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.late import LateZeRO1, delayed, late
from tests.strategies.parity import (
    Run,
    largest_difference,
    looks_at_no_gradient,
    make_trainer,
)

KINDS: dict[str, Callable[..., LateZeRO1]] = {"until waited for": late, "for a while": delayed}

Read = Callable[[list[Tensor]], list[Tensor]]


@looks_at_no_gradient
class Reads(Callback):
    """Reads parameters right after a step, when they are on their way: in one of several ways."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.parameters: list[list[Tensor]] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.parameters.append(self.read(list(pl_module.parameters())))
        self.losses.append(outputs["loss"].detach().clone())


def at_once(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def in_a_thread(parameters: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(on_another_stream(parameters)))
    thread.start()
    thread.join()
    return found


def on_another_stream(parameters: list[Tensor]) -> list[Tensor]:
    if devices.kind() == "cpu":
        return at_once(parameters)
    side = torch.cuda.Stream()
    # After the step, as under any strategy; that parameters are on their way is not the reader's business.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        read = at_once(parameters)
    side.synchronize()
    return read


def by_copies_to_pinned_memory(parameters: list[Tensor]) -> list[Tensor]:
    if devices.kind() == "cpu":
        return at_once(parameters)
    read = [torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True) for parameter in parameters]
    for copy, parameter in zip(read, parameters, strict=True):
        copy.copy_(parameter.detach(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return read


def by_kernels_for_many(parameters: list[Tensor]) -> list[Tensor]:
    return [copy.detach() for copy in torch._foreach_mul(parameters, 1.0)]


READS = (at_once, in_a_thread, on_another_stream, by_copies_to_pinned_memory, by_kernels_for_many)


def read_in_training(strategy: Any, read: Read) -> tuple[Run, int]:
    torch.manual_seed(0)
    reads, module = Reads(read), zoo.Attention()
    trainer = make_trainer(strategy, callbacks=[reads], gradient_clip_val=0.1)
    trainer.fit(module, zoo.loader(40, 4))
    under_way = 0 if strategy is None else strategy.under_way
    return Run(reads.parameters, reads.losses, module, trainer), under_way


def compare_reads(read: Read, kind: str) -> tuple[float, int]:
    expected, _ = read_in_training(None, read)
    actual, under_way = read_in_training(KINDS[kind](), read)
    return largest_difference(actual, expected), under_way


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", slow_unless(lambda read: read is in_a_thread, READS))
def test_whoever_reads_after_a_step_gets_what_was_stepped(ranks: RankPool, read: Read, kind: str) -> None:
    ((difference, under_way),) = ranks.run(1, compare_reads, read, kind)
    assert difference <= FP32 and under_way > 0


@looks_at_no_gradient
class ReadsTooEarly(Callback):
    """Past the parameters, by views that were taken before: nothing can see that."""

    def __init__(self) -> None:
        self.saw_nan = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        for bucket in trainer.strategy._engine.buckets:
            self.saw_nan |= bool(bucket.flat.isnan().any())


def read_too_early() -> bool:
    reads = ReadsTooEarly()
    make_trainer(late(), callbacks=[reads]).fit(zoo.MLP(), zoo.loader(20, 4))
    return reads.saw_nan


def test_what_is_read_past_the_guard_is_nan(ranks: RankPool) -> None:
    """Else the other tests here would pass whatever the package does."""
    assert ranks.run(1, read_too_early) == [True]
