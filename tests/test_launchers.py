"""Unmodified scripts, launched in every way that Lightning knows on one machine."""

from pathlib import Path

import pytest

from tests.scripts import run_script

SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    module = Module()
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[1],
        max_epochs=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    # By all ranks where these have shards.
    wholes = [getattr(parameter, "full_tensor", lambda: parameter)() for parameter in module.parameters()]
    if trainer.is_global_zero:
        total = sum(parameter.double().abs().sum() for parameter in wholes)
        print(f"weights {total.item():.5f}", flush=True)
"""


def weights_after(tmp_path: Path, strategy: str) -> str:
    output = run_script(SCRIPT, tmp_path, [strategy])
    return next(line for line in output.splitlines() if line.startswith("weights"))


@pytest.fixture(scope="module")
def weights_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Whatever launches the processes, DDP's weights are these."""
    return weights_after(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1_custom", "zero3_custom_spawn", "zero1_custom_fork"])
def test_the_weights_come_back_as_from_ddp(tmp_path: Path, weights_of_ddp: str, name: str) -> None:
    assert weights_after(tmp_path, name) == weights_of_ddp


AGAIN_IN_FORKED_PROCESSES = """
import os
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for _ in range(2):
    trainer = Trainer(accelerator="cpu", devices=1, strategy="zero1_custom", max_steps=3, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel())
    dist.destroy_process_group()
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        os.environ.pop(name, None)
Trainer(
    accelerator="cpu", devices=2, strategy="zero1_custom_fork", max_steps=3, limit_val_batches=0, **quiet
).fit(BoringModel())
print("trained again")
"""


@pytest.mark.slow
def test_processes_forked_after_an_earlier_training_do_not_hang(tmp_path: Path) -> None:
    # Whatever they inherit of destroyed process groups waits, when it is freed, for threads that were not forked.
    assert "trained again" in run_script(AGAIN_IN_FORKED_PROCESSES, tmp_path)
