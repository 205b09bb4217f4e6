"""Which files of the package a steady step enters, in which order: few enough to read."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_parstrat
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import train

PACKAGE = Path(lightning_parstrat.__file__).parent
STEADY = 5
MOST = {"zero1_custom": 48, "ddp_tuned": 38}
"""Files, by flag."""


class Traces(Callback):
    """Notes what the training's thread enters from one batch's start to the next one's."""

    def __init__(self) -> None:
        self.entered: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.entered.setdefault(path.relative_to(PACKAGE).as_posix())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self.note if batch_idx == STEADY else None)


# It looks at no gradient.
Traces.on_train_batch_start.__module__ = "lightning.pytorch.callbacks"


def files_of_a_step(flag: str) -> list[str]:
    """In the order in which a steady step enters them first, on this rank."""
    traces = Traces()
    train(zoo.MLP, flag, callbacks=[traces], gradient_clip_val=1.0)
    return list(traces.entered)


def test_a_steady_step_enters_few_files(pool: RankPool) -> None:
    for flag, most in MOST.items():
        for files in pool.run(2, files_of_a_step, flag):
            assert 5 < len(files) <= most, files
