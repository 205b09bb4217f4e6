"""Gradients that are not finite, beside the table of steps: what hooks do to them, loss scales, and errors."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_parstrat.errors import NonfiniteGradientError
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Poisoned, Regression, Sample, adamw, flat, fused, sgd
from tests.strategies.gradients.trainings import by_pairs, fit, strategy

BATCHES = 7
NORM: dict[str, Any] = {"gradient_clip_val": 0.2}
VALUE: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
BY_3: dict[str, Any] = {"accumulate_grad_batches": 3}
ONE, TWO = "network.0.bias", "network.2.weight"


class Repairs(Poisoned):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class SpoilsOnRank1(Poisoned):
    """Makes gradients NaN when they have been averaged, on one rank alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.count == 3 and dist.get_rank() == 1:
            self.get_parameter(ONE).grad.fill_(math.nan)


def hooks_change_gradients() -> list[tuple[int, float]]:
    """Steps left out, and the distance from ddp's end; then the same of the other rank's end."""
    found = []
    for kind in ("ddp_tuned", "exposed"):
        for arguments in ({}, NORM):
            reference, module, chosen = Repairs((2, 4)), Repairs((2, 4)), strategy(kind, nonfinite_grads="skip")
            fit(reference, DDPStrategy(), BATCHES, **arguments)
            fit(module, chosen, BATCHES, **arguments)
            found.append((chosen.skipped_steps, distance(module.seen, reference.seen)))
        module, chosen = SpoilsOnRank1(), strategy(kind, nonfinite_grads="skip")
        fit(module, chosen, BATCHES)
        others = [torch.empty_like(flat(module)) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat(module))
        found.append((chosen.skipped_steps, distance(others[0], others[1])))
    return found


def test_what_hooks_repair_is_stepped_with_and_what_one_makes_nan_is_left_out_on_all(pool: RankPool) -> None:
    for found in pool.run(2, hooks_change_gradients):
        assert [skipped for skipped, _ in found] == [0, 0, 1] * 2
        assert worst([apart for _, apart in found]) <= 1e-6


SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (sgd, {}),
    "clipped": (adamw, NORM),
    "fused": (fused, {}),
    "fused, clipped": (fused, NORM),
    "fused, clipped by value": (fused, VALUE),
    "accumulated": (sgd, {"accumulate_grad_batches": 2, **VALUE}),
}


class Scales(Callback):
    def __init__(self) -> None:
        self.seen = [2.0**20]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def scaled(chosen: Any, optimizer: Any, arguments: dict[str, Any]) -> tuple[Any, list[float]]:
    """What a training with a first scale so large that steps are left out for it has seen; a batch has NaN, too."""
    module, scales = Poisoned((4,), optimizer=optimizer), Scales()
    fit(module, chosen, BATCHES, callbacks=[scales], fp16=True, init_scale=2.0**20, **arguments)
    return module.seen, scales.seen


def half_precision(case: str, kinds: Sequence[str]) -> dict[tuple[str, str], Any]:
    """As stock 16-mixed?"""
    optimizer, arguments = SCALED[case]
    # Lightning refuses to clip for fused optimizers.
    stock, scales = scaled(DDPStrategy(), adamw if optimizer is fused else optimizer, arguments)
    halved = sum(after < before for before, after in itertools.pairwise(scales))
    found = {}
    for kind in kinds:
        for choice in ("propagate", "skip"):
            chosen = strategy(kind, nonfinite_grads=choice, partial_window="lightning")
            ours, own_scales = scaled(chosen, optimizer, arguments)
            found[kind, choice] = own_scales == scales, chosen.skipped_steps, halved, distance(ours, stock)
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(SCALED))
def test_the_loss_scale_goes_on_as_stock_and_its_skips_are_counted(
    pool: RankPool, case: str, kinds: tuple[str, ...]
) -> None:
    for found in pool.run(2, half_precision, case, kinds):
        for kind, (same_scales, skipped, halved, difference) in found.items():
            assert same_scales and skipped == halved >= 2 and difference <= 1e-4, kind


class Spoils(Poisoned):
    """Makes gradients infinite when backward is over."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with getattr(self.trainer.strategy, "full_gradients", torch.no_grad)():
            if self.count - 1 in self.at:
                self.get_parameter(ONE).grad.fill_(math.inf)

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.count += 1
        return Regression.training_step(self, batch, batch_idx)


# The module, what it does on which ranks, the Trainer's flags, and the error's place; "" where there is none.
RAISED: dict[str, tuple[type[Poisoned], dict[str, Any], tuple[int, ...], dict[str, Any], str]] = {
    "one": (Poisoned, {"only": TWO}, (1,), {}, "in epoch 0, batch 4"),
    "infinite on two ranks": (Poisoned, {"only": ONE, "value": math.inf}, (0, 2), {}, "in epoch 0, batch 4"),
    "in a window": (Poisoned, {"only": TWO}, (2,), {**BY_3, **NORM}, "in epoch 0, batch 5"),
    "all": (Poisoned, {}, (0,), {}, "in epoch 0, batch 4"),
    "by a hook": (Spoils, {}, (0, 1, 2), {}, "in epoch 0, batch 4"),
    "large squares": (Poisoned, {"only": ONE, "value": 1e30}, (0, 1), {}, ""),
}
SHOWN = {"by a hook": ("ddp_tuned", "zero1", "zero2", "exposed")}


def raise_at(case: str, kinds: Sequence[str]) -> dict[str, tuple[str, int, float, int, bool]]:
    """What was raised, in which batch; what it left of the step; and whether the same module trains on."""
    cls, poison, ranks, arguments, _ = RAISED[case]
    found = {}
    for kind in kinds:
        at = (4,) if dist.get_rank() in ranks else ()
        module = cls(optimizer=adamw, **{**poison, "rank": dist.get_rank(), "at": at})
        # It reads weights in its training step, which shards of units do not allow.
        flags = {"nonfinite_grads": "raise", **({"min_num_params": 100_000} if kind == "zero3" else {})}
        message = ""
        try:
            fit(module, strategy(kind, **flags), BATCHES, **arguments)
        except NonfiniteGradientError as error:
            message = str(error)
        batches, left = module.count, distance(module.seen[-1], flat(module))
        module.at, module.count = (), 0
        fit(module, strategy(kind, **flags), BATCHES, **arguments)
        found[kind] = message, batches, left, module.count, bool(flat(module).isfinite().all())
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(RAISED, SHOWN))
def test_all_ranks_raise_and_training_can_start_again(pool: RankPool, case: str, kinds: tuple[str, ...]) -> None:
    where = RAISED[case][-1]
    for found in pool.run(3, raise_at, case, kinds):
        for kind, (message, batches, left, again, finite) in found.items():
            assert where in message and bool(where) == bool(message), kind
            assert batches == (int(where[-1]) + 1 if where else BATCHES), kind
            assert (left, again, finite) == (0.0, BATCHES, True), kind
