"""The monitor logs the norms of the steps that were done, and listeners get each of them."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
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
from tests.strategies.gradients.big_batch import Poisoned, every, fused, train_on_big_batches, windows_of
from tests.strategies.gradients.trainings import by_pairs, fit, ranks_batches, strategy

BATCHES = 7
Rows = list[dict[str, float]]
Metrics = dict[str, float]


class Listens(Callback):
    def __init__(self) -> None:
        self.norms: list[GradientNorm] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.on_gradient_norm(self.norms.append)


def monitored(module: LightningModule, chosen: Any, folder: Path, callbacks: Any, **arguments: Any) -> Any:
    """What was logged, on rank 0 alone, and metrics."""
    logger = CSVLogger(folder, name="", version="")
    trainer = fit(module, chosen, BATCHES, logger=logger, callbacks=callbacks, **arguments)
    rows: Rows = []
    if dist.get_rank() == 0:
        with open(folder / "metrics.csv") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return rows, {name: float(value) for name, value in trainer.callback_metrics.items()}


NORM, VALUE = {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
# Steps between two logs, batches whose gradients are NaN (their steps are skipped), and the Trainer's flags.
ROWS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "nothing": (3, (), {}),
    "norm": (2, (), {**NORM, "max_epochs": 2}),
    "value": (1, (), VALUE),
    "skips": (3, (1, 6), NORM),
    "all skipped": (1, (2, 3), {}),
    "window": (1, (), {**NORM, "accumulate_grad_batches": 3, "max_epochs": 2}),
    "window skips": (2, (4,), {"accumulate_grad_batches": 3}),
    "end": (50, (), NORM),
}


def monitor_twice(name: str, kinds: tuple[str, ...], folder: Path) -> dict[str, tuple[Rows, Metrics, float]]:
    """Rows and metrics of two trainings by one monitor, and how far what listeners get is from one big batch."""
    log_every, at, flags = ROWS[name]
    windows = every(flags.get("accumulate_grad_batches", 1), BATCHES) * flags.get("max_epochs", 1)
    limit = {"max_value" if "gradient_clip_algorithm" in flags else "max_norm": flags.get("gradient_clip_val")}
    windows = [window if set(window).isdisjoint(at) else [] for window in windows]
    truth = train_on_big_batches(windows_of(ranks_batches(BATCHES), windows), **limit).norms
    found = {}
    for kind in kinds:
        monitor = GradNormMonitor()
        for number in range(2):
            listens, chosen = Listens(), strategy(kind, nonfinite_grads="skip" if at else "propagate")
            callbacks = [monitor, listens]
            where = folder / kind / str(number)
            rows, metrics = monitored(Poisoned(at), chosen, where, callbacks, log_every_n_steps=log_every, **flags)
            done = [norm for norm in truth if not math.isnan(norm)]
            apart = [distance([float(one.norm) for one in listens.norms], done)]
            if limit.get("max_norm"):
                coefficients = [float(one.coefficient) for one in listens.norms]
                apart.append(distance(coefficients, [min(1.0, NORM["gradient_clip_val"] / norm) for norm in done]))
            assert metrics["skipped_steps"] == chosen.skipped_steps == len(truth) - len(done)
            found[f"{kind}, {number}"] = rows, metrics, max(apart)
    found["expected"] = expected_rows(truth, log_every, limit.get("max_norm")), {}, 0.0
    return found


def expected_rows(steps: list[float], log_every: int, limit: float | None) -> Rows:
    """One of every ``log_every`` steps, and one of the rest at the end; a step that was skipped is NaN."""
    rows, skipped = [], 0
    for start in range(0, len(steps), log_every):
        end = min(start + log_every, len(steps))
        norms = [norm for norm in steps[start:end] if not math.isnan(norm)]
        skipped += end - start - len(norms)
        row = {"step": float(end - 1 if end == start + log_every else end), "skipped_steps": float(skipped)}
        if norms:
            row |= {"grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms)}
        if norms and limit is not None:
            row["grad_clip_ratio"] = sum(norm > limit for norm in norms) / len(norms)
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "kinds"), by_pairs(ROWS))
def test_it_logs_the_norms_of_big_batches(pool: RankPool, tmp_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    first, second = pool.run(2, monitor_twice, name, kinds, tmp_path)
    expected, _, _ = first.pop("expected")
    # The last value of each is in the trainer's metrics, on all ranks.
    last = {key: value for row in expected for key, value in row.items() if key != "step"}
    for training, (rows, metrics, apart) in first.items():
        assert rows == [pytest.approx(wanted, rel=1e-5) for wanted in expected] and apart <= 1e-5, training
        assert metrics == pytest.approx(last, rel=1e-5) and second[training][1] == metrics, training


def others(folder: Path) -> None:
    for kind in ("ddp_tuned", "zero1", "zero3"):
        # A norm that is not finite shows.
        rows, _ = monitored(Poisoned((1,)), strategy(kind), folder / kind / "nan", [GradNormMonitor("train/")])
        assert all(math.isnan(row["train/grad_norm"]) and row["train/skipped_steps"] == 0.0 for row in rows)
        # With a monitor on one rank alone, all ranks train.
        for rank in range(2):
            callbacks = [GradNormMonitor()] if dist.get_rank() == rank else []
            metrics = fit(Poisoned(), strategy(kind), BATCHES, callbacks=callbacks).callback_metrics
            assert ("grad_norm" in metrics) == (dist.get_rank() == rank)
        # Of steps that the device has skipped, norms are left out.
        listens, scale = Listens(), {"fp16": True, "init_scale": 2.0**20}
        module, where = Poisoned(optimizer=fused), folder / kind / "fused"
        _, metrics = monitored(module, strategy(kind), where, [GradNormMonitor(), listens], **NORM, **scale)
        done = [float(one.norm) for one in listens.norms if one.skipped is None or not one.skipped]
        assert metrics["skipped_steps"] == BATCHES - len(done) > 1
        assert metrics["grad_norm"] == pytest.approx(sum(done) / len(done), rel=1e-4)


@pytest.mark.slow
def test_nan_one_rank_alone_and_steps_skipped_on_the_device(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, others, tmp_path)


def test_other_strategies_are_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=DDPStrategy())
    with pytest.raises(MisconfigurationException, match=r"found DDPStrategy.*'ddp_tuned'.*'zero1_custom'"):
        GradNormMonitor().setup(trainer, LightningModule(), "fit")
