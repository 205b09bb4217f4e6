"""A LightningCLI program that knows nothing of clusters or of this package, and jobs that run it."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.slurm.cluster import SlurmCluster

PROGRAM = """
import os
import time

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader


class Tiny(LightningModule):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        run = os.environ.get("SLURM_RESTART_COUNT", "0")
        print(f"run {run} node {os.environ.get('SLURMD_NODENAME')} begins {self.trainer.global_step}", flush=True)
        time.sleep(self.seconds)
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(4000, 4), batch_size=2)

    def on_train_end(self):
        trainer = self.trainer
        print(f"trained {trainer.global_step} on {trainer.world_size} by {type(trainer.strategy).__name__}", flush=True)


if __name__ == "__main__":
    LightningCLI(Tiny)
"""
TRAINER: dict[str, Any] = {
    "strategy": "zero1_custom",
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Job(NamedTuple):
    """A job that was submitted by the command, and where its logs are."""

    number: int
    folder: Path
    log: Path

    def rank(self, rank: int) -> str:
        """What a rank has said so far, over all runs."""
        path = self.folder / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def begun(self, run: int, rank: int = 0) -> list[int]:
        return [int(step) for step in re.findall(rf"run {run} node \S+ begins (\d+)", self.rank(rank))]

    def says(self) -> str:
        """All logs, for a test that fails."""
        logs = [self.log, *sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists())


def write_program(folder: Path, steps: int, seconds: float = 0.0, **trainer: Any) -> None:
    (folder / "train.py").write_text(PROGRAM)
    config = {"trainer": {**TRAINER, "limit_train_batches": steps, **trainer}, "model": {"seconds": seconds}}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


def submit(
    cluster: SlurmCluster,
    folder: Path,
    *options: str,
    program: Sequence[str] = (sys.executable, "train.py", "fit", "--config", "c.yaml"),
) -> Job:
    sized = ("--nodes", "2", "--devices", "2", "--time", "10", "--submit", "--json", *options)
    command = [sys.executable, "-m", "lightning_parstrat.cli.main", "slurm", *sized, "--", *program]
    done = subprocess.run(
        command, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return Job(said["job"], Path(said["folder"]), Path(said["log"]))
