"""Optimizers of another package, by their users' word: sharded where each parameter steps alone, else kept whole."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import pytorch_optimizer
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded
from lightning_parstrat.distributed.zero1.shardability import decide_sharding
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import FP32, FP64
from tests.strategies.parity import by_flag, ddp, largest_difference, largest_loss_difference, reference, train, zero1


class ThirdParty(NamedTuple):
    optimizer: Callable[[Any], Optimizer]
    sharded: bool
    trainer: dict[str, Any] = {"precision": "64-true"}  # noqa: RUF012  (never changed)
    tolerance: float = FP64
    world_sizes: tuple[int, ...] = (2, 3)


def made(name: str, **arguments: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: getattr(pytorch_optimizer, name)(list(parameters), **arguments)


def schedule_free(parameters: Any) -> Optimizer:
    """In the mode that it is to train in."""
    optimizer = pytorch_optimizer.ScheduleFreeAdamW(list(parameters), lr=0.01, eps=1e-4)
    optimizer.train()
    return optimizer


# As the table in docs/how_zero1_works.md has them, beside those of CASES.
NOT_SHARDED = ("Kron", "DAdaptAdam", "DAdaptSGD", "AdaHessian", "SophiaH", "SAM", "ScheduleFreeSGD", "Prodigy")


@pytest.mark.parametrize("name", NOT_SHARDED)
def test_what_is_not_sharded_says_why_and_what_would_be(name: str) -> None:
    arguments = {"base_optimizer": torch.optim.SGD} if name == "SAM" else {}
    decision = decide_sharding(made(name, **arguments)(zoo.Convolutional().parameters()), "auto")
    assert decision.partition is None and decision.reason and decision.remedy
    # SAM's step is not one for each parameter: nobody must be told to promise that.
    assert ("partition='parameter'" in decision.remedy) is (name in ("AdaHessian", "SophiaH"))


CLIP = {"gradient_clip_val": 0.05, "precision": "64-true"}
CASES = {
    "Lamb": ThirdParty(made("Lamb", lr=0.01, eps=1e-4, weight_decay=0.01), True),
    "Lamb, by parameter": ThirdParty(made("Lamb", lr=0.01, eps=1e-4, foreach=False), True, CLIP),
    "Lamb, scaled by the norm of all gradients": ThirdParty(made("Lamb", lr=0.01, eps=1e-4, pre_norm=True), False),
    "Shampoo": ThirdParty(made("Shampoo", lr=0.01, momentum=0.5, matrix_eps=1e-2), True),
    # Its bases of matrices of low rank are arbitrary, chosen by rounding: which is DDP's between two ranks alone.
    "SOAP": ThirdParty(made("SOAP", lr=0.01, eps=1e-4, precondition_frequency=2), True, world_sizes=(2,)),
    "SOAP, where ranks are full": ThirdParty(
        made("SOAP", lr=0.01, eps=1e-4, precondition_frequency=2, max_precondition_dim=4), True, tolerance=FP32
    ),
    "Lion": ThirdParty(made("Lion", lr=1e-3, weight_decay=0.01), True),
    "Lion, clipped": ThirdParty(made("Lion", lr=1e-3), True, CLIP),
    "Adan": ThirdParty(made("Adan", lr=0.01, eps=1e-4, weight_decay=0.01), True),
    "Adan, clips by the norm of all gradients": ThirdParty(made("Adan", lr=0.01, eps=1e-4, max_grad_norm=0.1), False),
    "Prodigy": ThirdParty(made("Prodigy", lr=1.0, eps=1e-4, d0=1e-3), False),
    "ScheduleFreeAdamW": ThirdParty(schedule_free, False),
    "Lamb, single precision": ThirdParty(made("Lamb", lr=0.01, eps=1e-4), True, {}, FP32),
    "Adan, single precision": ThirdParty(made("Adan", lr=0.01, eps=1e-4), True, {}, FP32),
    "Adan, accumulated": ThirdParty(
        made("Adan", lr=0.01, eps=1e-4), True, {"accumulate_grad_batches": 3, "precision": "64-true"}
    ),
}


class Modes(Callback):
    """What an optimizer with modes asks of its user: averages in the parameters for validation, as of a batch's end."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for optimizer in trainer.optimizers:
            if batch_idx % 3 == 2 and hasattr(optimizer, "eval"):
                optimizer.eval()
                optimizer.train()


def compare(name: str, module: type[zoo.Zoo], strategy: ZeRO1Strategy | str) -> tuple[float, float, bool]:
    case = CASES[name]

    def make() -> zoo.Zoo:
        return module(case.optimizer)

    expected = reference((name, module), lambda: train(make, ddp(), callbacks=[Modes()], **case.trainer))
    actual = train(make, strategy, callbacks=[Modes()], **case.trainer)
    (optimizer,) = actual.trainer.optimizers
    sharded = is_sharded(optimizer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected), sharded


def compare_with_small_buckets(name: str, module: type[zoo.Zoo]) -> tuple[float, float, bool]:
    return compare(name, module, zero1())


def compare_by_flag(name: str, module: type[zoo.Zoo]) -> tuple[float, float, bool]:
    return compare(name, module, by_flag())


# Kernels in channels_last beside matrices and vectors; and parameters without gradients.
WAYS = {
    "small buckets": (zoo.Convolutional, compare_with_small_buckets),
    "by flag": (zoo.Convolutional, compare_by_flag),
    "unused": (zoo.Unused, compare_with_small_buckets),
}


# Each with small buckets on the most ranks, and otherwise on two.
GRID = [
    (name, way, case.world_sizes[-1] if way == "small buckets" else 2) for name, case in CASES.items() for way in WAYS
]


@pytest.mark.parametrize(
    ("name", "way", "world_size"),
    slow_unless(lambda name, way, _: way == "small buckets" or name in ("Lamb", "SOAP", "ScheduleFreeAdamW"), GRID),
)
def test_trains_as_ddp_does(pool: RankPool, name: str, way: str, world_size: int) -> None:
    case = CASES[name]
    module, how = WAYS[way]
    for parameters, losses, sharded in pool.run(world_size, how, name, module):
        assert sharded is case.sharded
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


def state_dicts(name: str) -> None:
    """What is saved is what DDP would save."""
    case = CASES[name]
    saved = []
    for strategy in (ddp(), zero1()):
        run = train(lambda: zoo.Convolutional(case.optimizer), strategy, **case.trainer)
        saved.append(run.trainer.optimizers[0].state_dict())
    expected, actual = saved
    assert_same(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["Lamb", "Shampoo", "SOAP", "Lion", "Adan", "Prodigy", "ScheduleFreeAdamW"])
def test_saves_what_ddp_would_save(pool: RankPool, name: str) -> None:
    pool.run(2, state_dicts, name)
