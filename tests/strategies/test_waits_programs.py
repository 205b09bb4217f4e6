"""Programs whose ranks wait for one that was stopped or killed, raises, or does something else."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import clean_environment

pytestmark = pytest.mark.slow

TRAINING = """
import datetime, os, signal, subprocess, sys, threading, time
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

class TornDown:
    def __del__(self):
        # Whatever is alive at the end is freed while the interpreter is torn down.
        time.sleep(6)

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.waits(self.global_rank)
        return super().training_step(batch, batch_idx)

    def waits(self, rank):
        WAITS

    def stops(self, seconds, then="CONT"):
        # Another process: this one is stopped.
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -{then} {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def fails(self):
        time.sleep(2)
        globals()["kept"] = TornDown()
        raise ValueError("this rank alone")

cls = {"zero1_custom": ZeRO1Strategy, "ddp_tuned": TunedDDPStrategy}["STRATEGY"]
strategy = cls(warn_after_seconds=1.5, timeout=datetime.timedelta(seconds=30), process_group_backend="gloo")
trainer = Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, max_steps=5, logger=False,
    limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model())
left = [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]
print(f"rank {trainer.global_rank} is done, threads left: {left}", flush=True)
"""


def run_nodes(folder: Path, strategy: str, does: str) -> tuple[list[str], list[int]]:
    """What the program prints on two nodes of a rank each, and how it ends there.

    Of processes that it has started itself, Lightning would end all as soon as it finds one gone.
    """
    path = folder / "train.py"
    path.write_text(TRAINING.replace("WAITS", does).replace("STRATEGY", strategy))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "LOCAL_RANK": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = [clean_environment(NODE_RANK=node, **meeting) for node in ("0", "1")]
    ranks = [subprocess.Popen([sys.executable, str(path)], cwd=folder, env=one, **pipes) for one in variables]
    try:
        return [rank.communicate(timeout=150)[0] for rank in ranks], [rank.returncode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


SILENT = r"rank 1, which has given no sign of life for \d+ s or more .*stopped"
BRANCH = 'rank == 0 and self.log("x", torch.tensor(1.0), sync_dist=True)'
LOGS = r"`training_step` \(step 2, .*\) at train\.py:\d+"
RAISES = "rank == 1 and (threading.Timer(20, lambda: None).start(), self.fails())"
LOST = "self.fails() if rank else self.stops(8, 'KILL')"
PROGRAMS: list[Any] = [
    pytest.param("ddp_tuned", "rank == 1 and self.stops(8)", [f"0 has waited .* for {SILENT}"], [0, 0], id="stopped"),
    # Both name both, and so does the error of the timeout.
    ("zero1_custom", BRANCH, [f"0 has waited .*{LOGS}", f"1 has waited .* rank 0, which is in {LOGS}"], [None, None]),
    ("ddp_tuned", RAISES, ["0 .* for rank 1, which ended its training by ValueError"], [None, 1]),
    # A thread that comes back from the store while the interpreter is torn down does not abort the process.
    ("zero1_custom", LOST, ["this rank alone"], [-9, 1]),
]
"""Strategy, what ranks do in the third batch, what is said, and how ranks end: None for any error."""


@pytest.mark.parametrize(("strategy", "does", "said", "codes"), PROGRAMS)
def test_a_program_says_for_whom_it_waits(
    tmp_path: Path, strategy: str, does: str, said: list[str], codes: list[int | None]
) -> None:
    outputs, found = run_nodes(tmp_path, strategy, does)
    for expected in said:
        assert any(re.search(expected, output) for output in outputs), (expected, outputs)
    for rank, (code, expected_code) in enumerate(zip(found, codes, strict=True)):
        assert code == expected_code or (expected_code is None and code != 0), (rank, code, outputs)
        assert code != 0 or f"rank {rank} is done, threads left: []" in outputs[rank], outputs
