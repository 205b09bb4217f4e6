"""The monitor logs the norms of the steps that were done, and listeners get each of them."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parstrat import GradNormMonitor
from lightning_parstrat.strategies.gradients.clipping import GradientNorm
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import (
    Poisoned,
    Regression,
    every,
    fused,
    sgd,
    train_on_big_batches,
    windows_of,
)
from tests.strategies.gradients.trainings import by_pairs, fit, ranks_batches, strategy

BATCHES = 7
Rows = list[dict[str, float]]


class Recorder(Callback):
    """The norm of every step, NaN for one that was skipped; and what listeners get."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.norms: list[GradientNorm] = []
        self.skipped = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.on_gradient_norm(self.norms.append)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        skipped, self.skipped = self.skipped, trainer.strategy.skipped_steps
        self.steps.append(math.nan if self.skipped > skipped else float(trainer.strategy.grad_norm))


def read(folder: Path) -> Rows:
    """What was logged; by rank 0 alone."""
    if dist.get_rank() != 0:
        return []
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def fit_logged(module: LightningModule, chosen: Any, folder: str, every: int, **arguments: Any) -> Trainer:
    logger = CSVLogger(folder, name="", version="")
    return fit(module, chosen, BATCHES, logger=logger, log_every_n_steps=every, **arguments)


# Steps between two logs, batches whose gradients are NaN (their steps are skipped), and flags.
RECORDED: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "nothing": (3, (), {}),
    "norm": (2, (), {"gradient_clip_val": 1.0, "max_epochs": 2}),
    "value": (1, (), {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "skips": (3, (1, 6), {"gradient_clip_val": 1.0}),
    "all skipped": (1, (2, 3), {}),
    "window": (1, (), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.75, "max_epochs": 2}),
    "window skips": (2, (4,), {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "end": (50, (), {"gradient_clip_val": 0.6}),
    "large": (4, (), {"fp16": True, "init_scale": 2.0**20, "gradient_clip_val": 0.9}),
    "fused": (4, (), {"fp16": True, "init_scale": 2.0**20, "gradient_clip_val": 0.9, "optimizer": fused}),
}


def monitored(name: str, kinds: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Norms of steps, rows and metrics of each strategy; of two trainings, by one module and one monitor."""
    every, at, arguments = RECORDED[name]
    found = {}
    for kind in kinds:
        flags, monitor = dict(arguments), GradNormMonitor()
        module = Poisoned(at, optimizer=flags.pop("optimizer", sgd))
        for number in range(2):
            recorder, where = Recorder(), f"{folder}/{kind}/{number}"
            chosen = strategy(kind, nonfinite_grads="skip" if at else "propagate")
            trainer = fit_logged(module, chosen, where, every, callbacks=[recorder, monitor], **flags)
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
            found[f"{kind}, {number}"] = recorder.steps, read(Path(where)), metrics
    return found


def expected_rows(steps: list[float], every: int, limit: float | None) -> Rows:
    """One of every ``every`` steps, and one of the rest at the end; a step that was skipped is NaN."""
    rows, skipped = [], 0
    for start in range(0, len(steps), every):
        end = min(start + every, len(steps))
        norms = [norm for norm in steps[start:end] if not math.isnan(norm)]
        skipped += end - start - len(norms)
        row = {"step": float(end - 1 if end == start + every else end), "skipped_steps": float(skipped)}
        if norms:
            row |= {"grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms)}
        if norms and limit is not None:
            row["grad_clip_ratio"] = sum(norm > limit for norm in norms) / len(norms)
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "kinds"), by_pairs(RECORDED))
def test_it_logs_the_norms_that_a_recorder_has_seen(
    pool: RankPool, tmp_path: Path, name: str, kinds: tuple[str, ...]
) -> None:
    every, _, arguments = RECORDED[name]
    limit = None if "gradient_clip_algorithm" in arguments else arguments.get("gradient_clip_val")
    windows = math.ceil(BATCHES / arguments.get("accumulate_grad_batches", 1))
    first, second = pool.run(2, monitored, name, kinds, str(tmp_path))
    for training, (steps, rows, metrics) in first.items():
        assert len(steps) == windows * arguments.get("max_epochs", 1)
        expected = expected_rows(steps, every, limit)
        if limit is not None and every != 50 and training.endswith("0"):
            assert len({row.get("grad_clip_ratio") for row in expected}) > 1
        assert rows == [pytest.approx(wanted, rel=1e-5) for wanted in expected], training
        # The last value of each is in the trainer's metrics, on all ranks.
        last: dict[str, float] = {}
        for row in expected:
            last |= {key: value for key, value in row.items() if key != "step"}
        assert metrics == pytest.approx(last, rel=1e-5) and second[training][2] == metrics, training


def others(folder: str) -> list[str]:
    """Checks of each strategy, and what Lightning's own is refused with."""
    truth = train_on_big_batches(windows_of(ranks_batches(BATCHES), every(3, BATCHES)), 0.2)
    for kind in ("ddp_tuned", "zero1", "zero3"):
        where, recorder = Path(folder) / kind, Recorder()
        # Listeners get the norm of the big batch, and what clipping multiplies gradients by.
        flags = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
        fit(Regression(), strategy(kind), BATCHES, callbacks=[recorder], **flags)
        assert distance([float(one.norm) for one in recorder.norms], truth.norms) <= 1e-5
        coefficients = [float(one.coefficient) for one in recorder.norms]
        assert distance(coefficients, [min(1.0, 0.2 / norm) for norm in truth.norms]) <= 1e-5
        # A norm that is not finite shows.
        fit_logged(Poisoned((1,)), strategy(kind), f"{where}/nan", 4, callbacks=[GradNormMonitor("train/")])
        for row in read(where / "nan"):
            assert math.isnan(row["train/grad_norm"]) and row["train/skipped_steps"] == 0.0
        # With a monitor on one rank alone, all ranks train.
        for rank in range(2):
            callbacks = [GradNormMonitor()] if dist.get_rank() == rank else []
            alone = fit_logged(Poisoned(), strategy(kind), f"{where}/{rank}", 2, callbacks=callbacks)
            assert ("grad_norm" in alone.callback_metrics) == (dist.get_rank() == rank)
    with pytest.raises(MisconfigurationException) as raised:
        fit_logged(Poisoned(), DDPStrategy(), folder, 1, callbacks=[GradNormMonitor()])
    return [str(raised.value)]


@pytest.mark.slow
def test_listeners_nan_and_other_strategies(pool: RankPool, tmp_path: Path) -> None:
    for (message,) in pool.run(2, others, str(tmp_path)):
        assert "DDPStrategy" in message and "ddp_tuned" in message and "zero1_custom" in message
