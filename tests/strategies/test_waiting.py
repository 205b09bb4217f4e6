"""Trainings that let one rank wait for another: what is said, when, and how they end."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from lightning_parstrat.distributed.comm import watch
from tests.distributed.comm.test_watch import Lines
from tests.pool import RankPool
from tests.strategies.parity import PoolEnvironment
from tests.undisturbed import undisturbed

SOON = 0.6
STRATEGIES: dict[str, Any] = {
    "zero1_custom": ZeRO1Strategy,
    "ddp_tuned": TunedDDPStrategy,
    "zero3_custom": ZeRO3Strategy,
}


def fit(
    strategy: str, model: LightningModule, batches: Any, folder: str, **trainer: Any
) -> tuple[list[str], list[str]]:
    """What this rank has said in a training of four batches, and the threads that are left."""
    lines = Lines()
    watch.log.addHandler(lines)
    try:
        fitting = Trainer(
            accelerator="cpu",
            devices=2,
            plugins=[PoolEnvironment()],
            strategy=STRATEGIES[strategy](warn_after_seconds=SOON),
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
            **trainer,
        )
        fitting.fit(model, batches)
        assert fitting.global_step == 4
    finally:
        watch.log.removeHandler(lines)
    return lines.said, [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]


class Late(BoringModel):
    """Rank 1 comes late to where it is told to: when rank 0 has said that it waits, or in the end."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def is_late(self, where: str) -> bool:
        return where == self.where and self.global_step == 2

    def comes_late(self) -> None:
        key = f"heard/{self.trainer.default_root_dir}"
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            lines = next(handler for handler in watch.log.handlers if isinstance(handler, Lines))
            threading.Thread(target=_tells, args=(store.clone(), key, lines, len(lines.said)), daemon=True).start()
            return
        deadline = time.monotonic() + 30
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.02)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_late("sleeps"):
            self.comes_late()
        if self.is_late("logs"):
            self.comes_late()
            self.log("logged", torch.tensor(1.0), sync_dist=True)
        if self.is_late("own collective"):
            self.comes_late()
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        # The step is counted by now.
        if self.global_step == 2 and self.where == "saves":
            self.comes_late()
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/late.ckpt")
        if self.is_late("shows"):
            self.comes_late()
            with self.trainer.strategy.full_parameters():
                assert self.layer.weight.shape == (2, 32)
        if self.is_late("looks"):
            self.comes_late()
            assert self.layer.weight.full_tensor().shape == (2, 32)


def _tells(store: Any, key: str, lines: Lines, before: int) -> None:
    deadline = time.monotonic() + 30
    while len(lines.said) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    store.set(key, "heard")


class LateBatches(IterableDataset[torch.Tensor]):
    """Of unknown length, and endless; rank 1's third does not come before rank 0 has said that it waits for it."""

    def __init__(self, model: Late) -> None:
        self.model = model

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(100):
            if self.model.where == "loads" and number == 2:
                self.model.comes_late()
            yield torch.ones(32)


def trains_with_a_late_rank(strategy: str, where: str, folder: str) -> tuple[list[str], list[str]]:
    model = Late(where)
    return fit(strategy, model, DataLoader(LateBatches(model), batch_size=1), folder)


STEP = r"\(step 2, epoch 0, batch 3\)"
HERE = r"at test_waiting\.py:\d+"
SLEEPS = rf"for rank 1, which is in `training_step` {STEP} {HERE}\."
LATE = rf"for rank 1, which is in `on_train_batch_end` \(.*\) {HERE}\."
SAID = {
    ("zero1_custom", "sleeps"): rf"in `\w+` {STEP} at \S+ {SLEEPS}",
    ("ddp_tuned", "sleeps"): rf"in `backward` {STEP} at \S+ {SLEEPS}",
    ("zero1_custom", "logs"): rf"in `training_step` {STEP} {HERE} {SLEEPS}",
    ("ddp_tuned", "own collective"): rf"in `training_step` {STEP} {HERE} {SLEEPS}",
    ("zero1_custom", "saves"): rf"in `trainer\.save_checkpoint\(\)` \(step 2, .*\) {HERE} {LATE}",
    ("zero3_custom", "shows"): rf"in `strategy\.full_parameters\(\)` \(step 2, .*\) {HERE} {LATE}",
    ("zero3_custom", "looks"): rf"in `on_train_batch_end` \(step 2, .*\) {HERE} {LATE}",
    (
        "zero1_custom",
        "loads",
    ): r"in the agreement on the next training batch \(step \d, .*\) at \S+ for rank 1, which is in ",
}
"""By strategy and where rank 1 is late: what rank 0 says."""


@pytest.mark.parametrize(("strategy", "where"), SAID)
@undisturbed
def test_a_rank_that_waits_in_training_says_for_whom(pool: RankPool, tmp_path: Path, strategy: str, where: str) -> None:
    (said, threads), (_, threads_of_1) = pool.run(2, trains_with_a_late_rank, strategy, where, str(tmp_path))
    assert threads == threads_of_1 == []
    # On a busy machine a rank may wait long elsewhere, too.
    expected = rf"{strategy}: rank 0 has waited \d+ s {SAID[strategy, where]}"
    assert any(re.match(expected, line) for line in said), said
