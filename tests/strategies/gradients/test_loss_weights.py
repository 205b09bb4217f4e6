"""A loss with a weight counts for as much of its window: beside the table of steps, what else weights touch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, Sample, flat, train_on_big_batches, windows_of
from tests.strategies.gradients.poison import adamw
from tests.strategies.gradients.trainings import KINDS, WEIGHTS, by_pairs, fit, ranks_batches, strategy

BATCHES = 8


class ByHand(Regression):
    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted=weighted)
        self.automatic_optimization = False

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(output["loss"] if self.weighted else output)
        self.optimizers().step()
        return output


def by_hand(kind: str) -> tuple[float, list[str]]:
    modules = ByHand(True), ByHand(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            fit(module, strategy(kind), BATCHES)
    said = [str(one.message) for one in caught if "loss_weight" in str(one.message)]
    return distance(modules[0].seen, modules[1].seen), said


@pytest.mark.parametrize("kind", KINDS[:2])
def test_manual_optimization_is_told_once_that_weights_have_no_effect(pool: RankPool, kind: str) -> None:
    for rank, (difference, said) in enumerate(pool.run(2, by_hand, kind)):
        assert difference == 0.0
        assert len(said) == (rank == 0)
        assert all("manual optimization" in one for one in said)


def distances_from_truth(accumulate: int, kinds: tuple[str, ...]) -> tuple[float, list[float]]:
    """In bf16-mixed: of Lightning's own training without any weights, and of ours with weights."""
    found = []
    for chosen, weights in ((DDPStrategy(), (1.0,)), *((strategy(kind), WEIGHTS) for kind in kinds)):
        module = Regression(weighted=weights is WEIGHTS)
        flags = {"accumulate_grad_batches": accumulate, "max_epochs": 3, "limit_train_batches": 6}
        fit(module, chosen, BATCHES, precision="bf16-mixed", **flags)
        data = [rank[:6] for rank in ranks_batches(BATCHES, weights)]
        truth = train_on_big_batches(windows_of(data, accumulate) * 3).parameters[-1]
        found.append(float((flat(module) - truth).norm()))
    return found[0], found[1:]


@pytest.mark.parametrize(("accumulate", "kinds"), by_pairs(["1", "3"]))
def test_weights_cost_no_precision_in_bf16(pool: RankPool, accumulate: str, kinds: tuple[str, ...]) -> None:
    for stock, ours in pool.run(2, distances_from_truth, int(accumulate), kinds):
        assert all(0 < one <= 2 * stock for one in ours)


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


class TimesWeights(Regression):
    def __init__(self, times: float) -> None:
        super().__init__(adamw, weighted=True)
        self.times = times

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss_weight": output["loss_weight"] * self.times}


def weights_times(kind: str, accumulate: int, first_scale: float) -> list[tuple[list[Tensor], list[float]]]:
    found = []
    for times in (1.0, 65536.0, 2.0**-12):
        module, scales = TimesWeights(times), Scales()
        flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.2, "max_epochs": 2}
        fit(module, strategy(kind), 7, fp16=True, init_scale=first_scale, callbacks=[scales], **flags)
        found.append((module.seen, scales.seen))
    return found


@pytest.mark.parametrize(
    ("kind", "accumulate", "first_scale"), [("ddp_tuned", 1, 128.0), ("zero1", 3, 2.0**20), ("zero2", 3, 128.0)]
)
def test_the_size_of_weights_changes_neither_steps_nor_loss_scales(
    pool: RankPool, kind: str, accumulate: int, first_scale: float
) -> None:
    for plain, *others in pool.run(2, weights_times, kind, accumulate, first_scale):
        assert len(set(plain[1])) > 1
        for other in others:
            assert other[1] == plain[1]
            assert all(torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True))


class LooksAtTheLoss(torch.optim.SGD):
    """Cannot do without its closure, and keeps what that has come to."""

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
    """What the optimizer was told, and this rank's losses with their weights."""
    notes = NotesLosses()
    trainer = fit(Regression(LooksAtTheLoss, weighted), strategy(kind), BATCHES, callbacks=[notes])
    return trainer.strategy.optimizers[0].losses, notes.seen


@pytest.mark.parametrize(("kind", "weighted"), [("ddp_tuned", True), ("zero1", False), ("zero1", True)])
def test_an_optimizer_that_needs_the_loss_gets_its_mean_over_ranks(pool: RankPool, kind: str, weighted: bool) -> None:
    ranks = pool.run(2, losses_for_the_optimizer, kind, weighted)
    pairs = zip(*(own for _, own in ranks), strict=True)
    expected = [sum(weight * loss for loss, weight in pair) / sum(weight for _, weight in pair) for pair in pairs]
    for told, _ in ranks:
        assert told == pytest.approx(expected, rel=1e-6)
