"""Parameters and losses equal those of a single process on the whole batch, or of DDP, step by step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import Optimizer

from lightning_parstrat import ZeRO1Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, train, zero1

FP32, FP64 = 2e-5, 1e-9


class Case(NamedTuple):
    module: type[zoo.Zoo]
    optimizer: Callable[..., Optimizer] = zoo.adamw
    trainer: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    oracle: str = "whole batch"
    tolerance: float = FP32
    world_sizes: tuple[int, ...] = (1, 2, 3)
    strategy: dict[str, Any] = {}  # noqa: RUF012


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adagrad(parameters: Any) -> Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)


def amsgrad(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-4, amsgrad=True)


def foreach(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, foreach=True)


def fused(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)


def rmsprop(parameters: Any) -> Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-3, momentum=0.5, centered=True)


def adafactor(parameters: Any) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


CLIP = {"gradient_clip_val": 0.05}
CASES = {
    # Ten kinds of modules, by a single process on the whole batch.
    "mlp": Case(zoo.MLP),
    "convolutional": Case(zoo.Convolutional),
    "tied": Case(zoo.TiedLanguageModel),
    "attention": Case(zoo.Attention),
    "recurrent": Case(zoo.Recurrent),
    "unused": Case(zoo.Unused),
    "frozen": Case(zoo.Frozen),
    "bare parameters": Case(zoo.BareParameters),
    "scheduled": Case(zoo.ScheduledTransformer, trainer={"precision": "64-true"}, tolerance=FP64),
    "scheduled, single precision": Case(zoo.ScheduledTransformer, oracle="ddp"),
    "complex": Case(zoo.Complex),
    # Whose result depends on how the batch is split: by DDP.
    "unused by some ranks": Case(zoo.UnusedBySomeRanks, oracle="ddp"),
    "batch norm": Case(zoo.BatchNormalised, trainer={"max_epochs": 2}, oracle="ddp"),
    "gan": Case(zoo.Adversarial, oracle="ddp"),
    # Optimizers.
    "sgd": Case(zoo.MLP, sgd),
    "sgd, unused": Case(zoo.Unused, sgd),
    "adagrad, whose state exists before the first step": Case(zoo.MLP, adagrad),
    "amsgrad": Case(zoo.Convolutional, amsgrad, world_sizes=(2, 3)),
    "rmsprop": Case(zoo.MLP, rmsprop, world_sizes=(3,)),
    "foreach": Case(zoo.Attention, foreach, world_sizes=(2, 3)),
    "fused": Case(zoo.Attention, fused, world_sizes=(2, 3)),
    "adafactor, which looks at whole matrices": Case(zoo.Convolutional, adafactor, world_sizes=(2, 3)),
    # Clipping and accumulation.
    "clip by norm": Case(zoo.MLP, trainer=CLIP),
    "clip by value": Case(zoo.MLP, trainer={"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}),
    "clip by norm, unused": Case(zoo.Unused, trainer=CLIP, world_sizes=(2, 3)),
    "clip by norm, fewer parameters than ranks": Case(zoo.BareParameters, sgd, trainer=CLIP, world_sizes=(2, 3)),
    "accumulate": Case(zoo.MLP, trainer={"accumulate_grad_batches": 2}, oracle="ddp"),
    "accumulate, short window": Case(
        zoo.TiedLanguageModel, trainer={"accumulate_grad_batches": 3, **CLIP}, oracle="ddp"
    ),
    "accumulate, unused": Case(zoo.Unused, trainer={"accumulate_grad_batches": 3}, oracle="ddp", world_sizes=(2, 3)),
    # Precision.
    "double": Case(zoo.ScheduledTransformer, trainer={"precision": "64-true", **CLIP}, tolerance=FP64),
    "double, unused by some ranks": Case(
        zoo.UnusedBySomeRanks, trainer={"precision": "64-true"}, oracle="ddp", tolerance=FP64, world_sizes=(2, 3)
    ),
    "bf16 autocast": Case(zoo.MLP, trainer={"precision": "bf16-mixed", **CLIP}, oracle="ddp", world_sizes=(2, 3)),
    "fp16 autocast, a scaler": Case(zoo.MLP, trainer={"fp16": True, **CLIP}, oracle="ddp", tolerance=1e-3),
    "fp16 autocast, a scale so large that steps are skipped": Case(
        zoo.MLP, trainer={"fp16": True, "init_scale": 2.0**24}, oracle="ddp", tolerance=1e-3, world_sizes=(2, 3)
    ),
    # The strategy's own arguments.
    "exposed": Case(zoo.MLP, trainer=CLIP, strategy={"expose_gradients": True}),
    "exposed, unused by some ranks": Case(
        zoo.UnusedBySomeRanks, oracle="ddp", trainer=CLIP, strategy={"expose_gradients": True}
    ),
    "exposed, accumulated": Case(
        zoo.Unused, oracle="ddp", trainer={"accumulate_grad_batches": 2}, strategy={"expose_gradients": True}
    ),
    "exposed gan": Case(zoo.Adversarial, oracle="ddp", strategy={"expose_gradients": "auto"}),
    "exposed, a scaler": Case(
        zoo.MLP,
        trainer={"fp16": True, **CLIP},
        oracle="ddp",
        tolerance=1e-3,
        world_sizes=(2, 3),
        strategy={"expose_gradients": True},
    ),
    "one bucket": Case(zoo.Attention, strategy={"bucket_cap_mb": 25}, world_sizes=(2, 3)),
    "a bucket for each parameter": Case(zoo.Attention, strategy={"bucket_cap_mb": 1e-6}, world_sizes=(2, 3)),
    "whole parameters": Case(zoo.Convolutional, strategy={"partition": "parameter"}),
}


def compare(case: Case, strategy: ZeRO1Strategy | str) -> tuple[float, float]:
    def make() -> zoo.Zoo:
        return case.module(case.optimizer)

    whole_batch = case.oracle == "whole batch"
    expected = train(make, None if whole_batch else ddp(), whole_batch=whole_batch, **case.trainer)
    actual = train(make, strategy, **case.trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected)


def compare_with_small_buckets(case: Case) -> tuple[float, float]:
    return compare(case, zero1(**case.strategy))


def compare_by_flag(case: Case) -> tuple[float, float]:
    """As a user has it: the callbacks of this comparison make "auto" expose gradients, and one bucket holds all."""
    return compare(case, "zero1_custom")


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, size) for name, case in CASES.items() for size in case.world_sizes]
)
def test_trains_as_the_oracle_does(pool: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(world_size, compare_with_small_buckets, case):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, size) for name, case in CASES.items() if not case.strategy for size in case.world_sizes],
)
def test_trains_as_the_oracle_does_by_flag(pool: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(world_size, compare_by_flag, case):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


def train_differently(world_size: int) -> float:
    expected = train(lambda: zoo.MLP(), None, whole_batch=True)
    actual = train(lambda: zoo.MLP(), zero1(), gradient_clip_val=0.01)
    return largest_difference(actual, expected)


def test_the_comparison_sees_a_difference(pool: RankPool) -> None:
    assert min(pool.run(2, train_differently, 2)) > 100 * FP32
