"""A training of two ranks, started by hand, in which rank 1 runs out of memory in the third step."""

import faulthandler
import os
import sys
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_parstrat import ZeRO1Strategy, ZeRO3Strategy
from tests import devices
from tests.gpu.trainings import Layers
from tests.strategies.zoo import adamw


def run_out() -> None:
    if devices.kind() == "cpu":
        raise torch.OutOfMemoryError("as a GPU would")
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


class RunsOut(Layers):
    where = ""

    def fail_in(self, where: str) -> None:
        if self.where == where and self.global_rank == 1 and self.global_step == 2:
            run_out()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail_in("forward")
        loss = super().training_step(batch, batch_idx)
        # The last gradient to come: others are on their way by then.
        self.layers[0].bias.register_hook(lambda gradient: self.fail_in("backward"))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.fail_in("step"))
        return optimizer


def main(device: str, where: str, stage: str) -> None:
    # Where each thread is, in the log, if it waits for the one that is gone.
    faulthandler.dump_traceback_later(60, exit=True)
    devices.become(device, int(os.environ["RANK"]))
    RunsOut.where = where
    trainer = Trainer(
        accelerator=device,
        devices=1,
        num_nodes=2,
        strategy=ZeRO1Strategy(bucket_cap_mb=0.01) if stage == "1" else ZeRO3Strategy(min_num_params=0),
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(RunsOut(), DataLoader(torch.zeros(8, 1), batch_size=1))
    print("still there", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
