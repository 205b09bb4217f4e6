"""Loss weights, beside the table of steps: manual optimization, loss scales, and optimizers that need the loss."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, Sample
from tests.strategies.gradients.trainings import KINDS, fit, strategy

BATCHES = 8


class ByHand(Regression):
    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(output["loss"] if self.weighted else output)
        self.optimizers().step()
        return output


def by_hand(kind: str) -> tuple[float, int]:
    modules = ByHand(weighted=True), ByHand()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            module.automatic_optimization = False
            fit(module, strategy(kind), BATCHES)
    said = sum("`loss_weight` has no effect in manual optimization" in str(one.message) for one in caught)
    return distance(modules[0].seen, modules[1].seen), said


def test_a_warning_says_that_weights_have_no_effect_in_manual_optimization(pool: RankPool) -> None:
    for kind in KINDS[:2]:
        assert pool.run(2, by_hand, kind) == [(0.0, 1), (0.0, 0)]


class LooksAtTheLoss(torch.optim.SGD):
    """Needs its closure, and keeps the losses."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.losses: list[float] = []

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        self.losses.append(float(loss))
        super().step()
        return loss


class NotesLosses(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, out: Any, batch: Sample, _: int) -> None:
        self.seen.append((float(out["loss"]), batch.weight))


def losses_for_the_optimizer(kind: str, weighted: bool) -> tuple[list[float], list[tuple[float, float]]]:
    """The losses that the optimizer got, and those of this rank with their weights."""
    notes = NotesLosses()
    trainer = fit(Regression(LooksAtTheLoss, weighted), strategy(kind), BATCHES, callbacks=[notes])
    return trainer.strategy.optimizers[0].losses, notes.seen


@pytest.mark.parametrize(("kind", "weighted"), [("ddp_tuned", True), ("zero1", False)])
def test_an_optimizer_that_needs_the_loss_gets_its_mean_over_ranks(pool: RankPool, kind: str, weighted: bool) -> None:
    ranks = pool.run(2, losses_for_the_optimizer, kind, weighted)
    pairs = zip(*(own for _, own in ranks), strict=True)
    expected = [sum(weight * loss for loss, weight in pair) / sum(weight for _, weight in pair) for pair in pairs]
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-6)
