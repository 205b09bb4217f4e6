"""Programs whose ranks wait for one that raises, or was killed."""

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
import datetime, functools, os, signal, subprocess, sys, threading, time
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

class TornDown:
    def __del__(self):
        # Whatever is alive at the end is freed while the interpreter is torn down.
        time.sleep(4)

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.waits(self.global_rank)
        return super().training_step(batch, batch_idx)

    def waits(self, rank):
        WAITS

    def is_killed(self, seconds):
        # Another process: this one is stopped.
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def fails(self):
        time.sleep(1)
        globals()["kept"] = TornDown()
        raise ValueError("this rank alone")

groups = functools.partial(ZeRO1Strategy, shard_group=1, outer_every=4)
cls = {"zero1_custom": ZeRO1Strategy, "ddp_tuned": TunedDDPStrategy, "groups": groups}["STRATEGY"]
strategy = cls(stall_warning_seconds=1.5, timeout=datetime.timedelta(seconds=30), process_group_backend="gloo")
trainer = Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, max_steps=5, logger=False,
    limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model())
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


LOST_GROUP = (
    "(?s)rank 0 has waited .* in the meeting of groups after step 4 .* for rank 1, .* To continue without a group,"
    " start the ranks of the others from the last checkpoint.*Rank 1 did not answer: ended"
)
PROGRAMS: list[Any] = [
    (
        "ddp_tuned",
        "rank == 1 and (threading.Timer(4, lambda: None).start(), self.fails())",
        "0 .* for rank 1, which ended its training by ValueError",
        [None, 1],
    ),
    # A thread that comes back from the store while the interpreter is torn down does not abort the process.
    ("zero1_custom", "self.fails() if rank else self.is_killed(4)", "this rank alone", [-9, 1]),
    ("groups", "rank and self.is_killed(4)", LOST_GROUP, [1, -9]),
]
"""Strategy, what ranks do in the third batch, what is said, and how ranks end: None for any error."""


@pytest.mark.parametrize(("strategy", "does", "said", "codes"), PROGRAMS, ids=["raises", "is killed", "lost group"])
def test_a_program_says_for_whom_it_waits(
    tmp_path: Path, strategy: str, does: str, said: str, codes: list[int | None]
) -> None:
    outputs, found = run_nodes(tmp_path, strategy, does)
    assert any(re.search(said, output) for output in outputs), outputs
    for code, expected in zip(found, codes, strict=True):
        assert code == expected or (expected is None and code != 0), (found, outputs)
