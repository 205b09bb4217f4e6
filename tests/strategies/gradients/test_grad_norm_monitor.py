"""What the callback logs is what became of the gradients, and asking costs no waiting."""

import csv
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_parstrat import GradNormMonitor
from lightning_parstrat.strategies.gradients.clipping import GradientNorm
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, sgd, train_on_big_batches, windows_of
from tests.strategies.gradients.poison import Poisoned, fused
from tests.strategies.gradients.trainings import KINDS, by_pairs, fit, ranks_batches, strategy
from tests.strategies.gradients.two_optimizers import TwoOptimizers

BATCHES = 7
Rows = list[dict[str, float]]


class Recorder(Callback):
    """The norm and the limit of every step that was done, by what the strategy tells of its latest."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.skipped = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        skipped, self.skipped = self.skipped, trainer.strategy.skipped_steps
        self.steps.append(math.nan if self.skipped > skipped else float(trainer.strategy.grad_norm))


def read(folder: Path) -> Rows:
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def fit_logged(module: LightningModule, chosen: Any, folder: str, every: int, **arguments: Any) -> Trainer:
    logger = CSVLogger(folder, name="", version="")
    return fit(module, chosen, BATCHES, logger=logger, log_every_n_steps=every, **arguments)


def monitored(case: str, kinds: tuple[str, ...], folder: str) -> dict[str, Any]:
    found = {}
    every, at, arguments = RECORDED[case]
    for kind in kinds:
        recorder, flags, where = Recorder(), dict(arguments), f"{folder}/{kind}"
        module = Poisoned(at, optimizer=flags.pop("optimizer", sgd))
        chosen = strategy(kind, nonfinite_grads="skip" if at else "propagate")
        trainer = fit_logged(module, chosen, where, every, callbacks=[recorder, GradNormMonitor()], **flags)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found[kind] = recorder.steps, read(Path(where)) if dist.get_rank() == 0 else [], metrics
    return found


def expected_rows(steps: list[float], every: int, limit: float | None) -> Rows:
    """Of what every ``every`` steps have done, and of what is left at the end; a step that was skipped is NaN."""
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


RECORDED: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "nothing": (3, (), {}),
    "norm": (2, (), {"gradient_clip_val": 1.0, "max_epochs": 2}),
    "value": (1, (), {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "skips": (3, (1, 6), {"gradient_clip_val": 1.0}),
    "all skipped": (1, (2, 3), {}),
    "window": (1, (), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.75, "max_epochs": 2}),
    "window skips": (2, (4,), {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "end": (50, (), {"gradient_clip_val": 0.6}),
    "bf16": (2, (), {"precision": "bf16-mixed", "gradient_clip_val": 1.0}),
    "16": (2, (), {"fp16": True, "gradient_clip_val": 1.0}),
    "large": (4, (), {"fp16": True, "init_scale": 2.0**20, "gradient_clip_val": 0.9}),
    "fused": (4, (), {"fp16": True, "init_scale": 2.0**20, "gradient_clip_val": 0.9, "optimizer": fused}),
}


@pytest.mark.parametrize(("case", "kinds"), by_pairs(RECORDED))
def test_it_logs_what_a_recorder_of_the_norm_has_seen(
    pool: RankPool, tmp_path: Path, case: str, kinds: tuple[str, ...]
) -> None:
    every, _, arguments = RECORDED[case]
    limit = None if "gradient_clip_algorithm" in arguments else arguments.get("gradient_clip_val")
    windows = math.ceil(BATCHES / arguments.get("accumulate_grad_batches", 1))
    told = pool.run(2, monitored, case, kinds, str(tmp_path))
    for kind in kinds:
        steps, rows, _ = told[0][kind]
        assert len(steps) == windows * arguments.get("max_epochs", 1)
        expected = expected_rows(steps, every, limit)
        if limit is not None and every != 50:
            assert len({row.get("grad_clip_ratio") for row in expected}) > 1
        assert rows == [pytest.approx(wanted, rel=1e-5) for wanted in expected], kind
        # The last that there was of each is in the trainer's metrics, on all ranks.
        last: dict[str, float] = {}
        for row in expected:
            last |= {name: value for name, value in row.items() if name != "step"}
        assert [of_rank[kind][2] for of_rank in told] == [pytest.approx(last, rel=1e-5)] * 2, kind


class Listens(Callback):
    """Asks for the norm as a user may."""

    def __init__(self) -> None:
        self.told: list[GradientNorm] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.on_gradient_norm(self.told.append)


def listened(case: str, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    flags: dict[str, Any] = {"accumulate_grad_batches": 3}
    flags |= {"gradient_clip_val": 0.2} if case == "clipped" else {}
    truth = train_on_big_batches(windows_of(ranks_batches(BATCHES), 3), flags.get("gradient_clip_val"))
    found = {}
    for kind in kinds:
        listens = Listens()
        fit(Regression(), strategy(kind), BATCHES, callbacks=[listens], **flags)
        # What torch multiplies gradients by.
        coefficients = [min(1.0, 0.2 / norm) if case == "clipped" else -1.0 for norm in truth.norms]
        ours = [-1.0 if one.coefficient is None else float(one.coefficient) for one in listens.told]
        assert not any(one.skipped for one in listens.told)
        found[kind] = [
            distance([float(one.norm) for one in listens.told], truth.norms),
            distance(ours, coefficients),
        ]
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(["clipped", "not clipped"]))
def test_who_listens_is_told_the_norm_of_the_big_batch(pool: RankPool, case: str, kinds: tuple[str, ...]) -> None:
    for found in pool.run(2, listened, case, kinds):
        assert worst(found) <= 1e-5


def several_optimizers(kind: str, folder: str) -> tuple[list[float], Rows]:
    norms: list[float] = []

    def clip(module: Any, optimizers: list[Any]) -> None:
        for optimizer, limit in zip(optimizers, (1e9, 0.5), strict=True):
            module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            norms.append(float(module.trainer.strategy.grad_norm))

    fit_logged(TwoOptimizers(clip), strategy(kind), folder, 2, callbacks=[GradNormMonitor("train/")])
    return norms, read(Path(folder)) if dist.get_rank() == 0 else []


@pytest.mark.parametrize("kind", KINDS[:2])
def test_steps_of_all_optimizers_count_and_names_begin_with_the_prefix(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    norms, rows = pool.run(2, several_optimizers, kind, str(tmp_path))[0]
    assert len(norms) == 2 * BATCHES
    for row, start in zip(rows, range(0, len(norms), 4), strict=True):
        of_row = norms[start : start + 4]
        assert row["train/grad_norm"] == pytest.approx(sum(of_row) / len(of_row), rel=1e-5)
        assert row["train/grad_norm_max"] == pytest.approx(max(of_row), rel=1e-5)
        # The first optimizer's limit is never reached, the second one's always.
        assert row["train/grad_clip_ratio"] == 0.5
        assert {name.split("/")[0] for name in row} == {"step", "train"}


def on_one_rank(kind: str, rank: int, folder: str, arguments: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    callbacks: list[Callback] = [Recorder()] if rank < 0 or dist.get_rank() == rank or arguments else []
    mine = [GradNormMonitor()] if dist.get_rank() == rank else []
    trainer = fit_logged(Regression(), strategy(kind), folder, 2, callbacks=callbacks + mine, **arguments)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return callbacks[0].steps if callbacks else [], metrics


@pytest.mark.parametrize(
    ("kind", "rank", "arguments"), [("ddp_tuned", 1, {"gradient_clip_val": 0.3}), ("zero1", 0, {}), ("zero1", 1, {})]
)
def test_a_monitor_on_one_rank_alone_hangs_nobody(
    pool: RankPool, tmp_path: Path, kind: str, rank: int, arguments: dict[str, Any]
) -> None:
    told = pool.run(2, on_one_rank, kind, rank, str(tmp_path), arguments)
    steps, metrics = told[rank]
    assert metrics["grad_norm"] == pytest.approx(steps[-1], rel=1e-5)
    assert told[1 - rank][1] == {}


def under_lightnings_ddp(folder: str) -> str:
    with pytest.raises(MisconfigurationException) as raised:
        fit_logged(Regression(), DDPStrategy(), folder, 1, callbacks=[GradNormMonitor()])
    return str(raised.value)


def test_another_strategy_is_refused_and_told_which_to_choose(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(2, under_lightnings_ddp, str(tmp_path)):
        assert "DDPStrategy" in message and "ddp_tuned" in message and "zero1_custom" in message


def fit_twice(kind: str, folder: str) -> list[tuple[list[float], Rows]]:
    monitor, module, found = GradNormMonitor(), Poisoned((2,)), []
    for number in range(2):
        recorder, where = Recorder(), f"{folder}/{number}"
        fit_logged(module, strategy(kind, nonfinite_grads="skip"), where, 2, callbacks=[recorder, monitor])
        found.append((recorder.steps, read(Path(where)) if dist.get_rank() == 0 else []))
    return found


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_second_fit_is_counted_by_itself(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for steps, rows in pool.run(2, fit_twice, kind, str(tmp_path))[0]:
        assert rows == [pytest.approx(row, rel=1e-5) for row in expected_rows(steps, 2, None)]


WAITS = ("item", "cpu", "tolist", "numpy", "__float__", "__bool__", "__int__")


def waits(kind: str, folder: str, watches: bool, arguments: dict[str, Any]) -> list[int]:
    """How often the host asked for a tensor's value by the end of each batch; all of them on CPU, where it shows."""
    count, counts = 0, []
    originals = {name: getattr(Tensor, name) for name in WAITS}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return original(*args, **kwargs)

        return counted

    class Counts(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(count)

    for name, original in originals.items():
        setattr(Tensor, name, counting(original))
    try:
        callbacks = [GradNormMonitor()] if watches else []
        fit_logged(Counts(), strategy(kind), folder, 1000, callbacks=callbacks, **arguments)
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize(
    ("kind", "arguments"), [("ddp_tuned", {}), ("zero1", {"gradient_clip_val": 0.3}), ("zero2", {}), ("zero3", {})]
)
def test_no_step_waits_for_the_monitor(pool: RankPool, tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    without = pool.run(2, waits, kind, str(tmp_path), False, arguments)
    assert pool.run(2, waits, kind, str(tmp_path), True, arguments) == without
    assert all(len(counts) == BATCHES - 1 for counts in without)


def nan_in_the_middle(kind: str, folder: str) -> Rows:
    fit_logged(Poisoned((1,)), strategy(kind), folder, 4, callbacks=[GradNormMonitor()])
    return read(Path(folder)) if dist.get_rank() == 0 else []


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_norm_that_is_not_finite_shows(pool: RankPool, tmp_path: Path, kind: str) -> None:
    first, last = pool.run(2, nan_in_the_middle, kind, str(tmp_path))[0]
    assert math.isnan(first["grad_norm"]) and math.isnan(last["grad_norm"])
    assert first["skipped_steps"] == last["skipped_steps"] == 0.0
