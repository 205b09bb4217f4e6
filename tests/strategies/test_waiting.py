"""Trainings that let one rank wait for another: what is said, when, and how they end."""

import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.distributed.comm import watch
from tests.pool import RankPool
from tests.scripts import run_python

TRAINING = """
import sys, threading, time
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class SavesOnRank0(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            began = time.monotonic()
            if trainer.is_global_zero:
                state = module.optimizers().optimizer.state_dict()
                print(f"has waited {time.monotonic() - began:.1f} s")
            else:
                OTHERS

class Model(BoringModel):
    def configure_optimizers(self):
        import torch
        return torch.optim.Adam(self.parameters())

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="zero1_custom", max_epochs=1, limit_train_batches=4, logger=False,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, callbacks=SavesOnRank0(),
    )
    trainer.fit(Model())
    left = [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]
    print(f"rank {trainer.global_rank} is done, threads left: {left}", flush=True)
"""


def run(folder: Path, others: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "train.py"
    script.write_text(TRAINING.replace("OTHERS", others))
    return run_python([script], folder)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), 1) if text in line)


@pytest.mark.slow
def test_a_rank_that_saves_alone_says_so_within_fifteen_seconds(tmp_path: Path) -> None:
    ended = run(tmp_path, "time.sleep(16); module.optimizers().optimizer.state_dict()")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    said = re.findall(r"^.*has waited .* s\. .*$", output, re.MULTILINE)
    assert len(said) == 1, output
    place = rf"rank 1 is in `on_train_batch_end` \(train\.py, line {line_of('OTHERS')}\)\. Call it on all ranks"
    found = re.search(rf"zero1_custom, rank 0: `optimizer\.state_dict\(\)` has waited (\d+) s\. .*{place}", said[0])
    assert found is not None and 8 <= int(found[1]) < 15, said
    for rank in range(2):
        assert f"rank {rank} is done, threads left: []" in output
    assert "TCPStore" not in output and "Traceback" not in output, output


@pytest.mark.slow
def test_a_rank_that_raises_is_named(tmp_path: Path) -> None:
    # The program's end would end the other, too.
    others = "threading.Timer(30, lambda: None).start(); raise ValueError('this rank alone')"
    ended = run(tmp_path, others)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "rank 1 has ended its training by ValueError. Call it on all ranks" in output, output


LATE = 1.5


class LateBatches(IterableDataset[torch.Tensor]):
    """Of unknown length; rank 1's third comes late."""

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(4):
            if dist.get_rank() == 1 and number == 2:
                time.sleep(LATE)
            yield torch.ones(32)


class LateSave(Callback):
    """Saves after the second batch, rank 1 late."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/late.ckpt"

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == 2:
            if dist.get_rank() == 1:
                time.sleep(LATE)
            trainer.save_checkpoint(self.path)


def fit_with_waits(folder: str) -> tuple[list[str], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    watch.log.addHandler(handler)
    watch.TIMES = watch.Times(said_after=(0.4, 60.0), look=0.05)
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ZeRO1Strategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=LateSave(folder),
        )
        trainer.fit(BoringModel(), DataLoader(LateBatches(), batch_size=1))
        assert trainer.global_step == 4
    finally:
        watch.TIMES = watch.Times()
        watch.log.removeHandler(handler)
    return said, [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]


def test_in_a_training_saves_and_agreements_on_batches_say_for_whom_they_wait(pool: RankPool, tmp_path: Path) -> None:
    (said, threads), by_1 = pool.run(2, fit_with_waits, str(tmp_path))
    assert by_1 == ([], []) and threads == []
    # Either may come first: the loader draws a batch ahead.
    assert len(said) == 2, said
    save, batch = sorted(said, key=lambda line: "batch has waited" in line)
    assert re.match(r"zero1_custom, rank 0: `trainer\.save_checkpoint\(\)` has waited \d s\. All ranks must take", save)
    assert "rank 1 is in `on_train_batch_end` (test_waiting.py, line " in save
    assert batch.startswith("zero1_custom, rank 0: the agreement on the next training batch has waited ")
    assert "rank 1 is in `__iter__` (test_waiting.py, line " in batch
    assert (tmp_path / "late.ckpt").exists()
