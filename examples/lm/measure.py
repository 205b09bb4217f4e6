"""Step time and optimizer state under several strategies, measured in turns in one run on two CPU processes.

    python examples/lm/measure.py CHECKPOINT RESULT.json --strategies ddp zero1_custom

Lightning starts the second process from this same command line, so both do everything below; rank 0 writes the result.
"""

import argparse
import json
import logging
import time
import warnings
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data import StdlibBytes
from lightning.pytorch import Callback, LightningModule, Trainer
from model import ByteGPT

WARMUP_STEPS = 5


class Probe(Callback):
    """Notes when each step begins, and how many bytes of optimizer state each rank holds when training ends."""

    def __init__(self) -> None:
        self.step_starts: list[float] = []
        self.state_bytes: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.step_starts.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states = trainer.optimizers[0].state.values()
        own = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
        self.state_bytes = trainer.strategy.all_gather(torch.tensor([own])).flatten().tolist()

    def step_seconds(self) -> list[float]:
        """From the start of a step to the start of the next: what runs on behind a step is inside the clock."""
        starts = self.step_starts[WARMUP_STEPS:]
        return [after - before for before, after in pairwise(starts)]


@dataclass
class Measurement:
    """What one strategy needed."""

    step_seconds: list[float] = field(default_factory=list)
    state_bytes_per_rank: list[int] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        return median(self.step_seconds)

    @property
    def state_bytes(self) -> int:
        """On the rank that holds most."""
        return max(self.state_bytes_per_rank)


def fit_briefly(strategy: str, checkpoint: Path, steps: int) -> Probe:
    """Trains on from the checkpoint's weights for a few steps."""
    probe = Probe()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=WARMUP_STEPS + steps + 1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(ByteGPT.load_from_checkpoint(checkpoint), StdlibBytes.load_from_checkpoint(checkpoint))
    return probe


def measure(strategies: list[str], checkpoint: Path, rounds: int, steps: int) -> dict[str, Measurement]:
    """The strategies take turns, so that whatever slows the machine for a while slows all of them."""
    results = {strategy: Measurement() for strategy in strategies}
    for _ in range(rounds):
        for strategy, result in results.items():
            probe = fit_briefly(strategy, checkpoint, steps)
            result.step_seconds += probe.step_seconds()
            result.state_bytes_per_rank = probe.state_bytes
    return results


def read(path: Path) -> dict[str, Measurement]:
    """The measurements that a run of this program has written."""
    return {strategy: Measurement(**values) for strategy, values in json.loads(path.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of main.py: the model and the data to measure with")
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1_custom"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2, help="short fits per strategy (default: 2)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per fit (default: 20)")
    args = parser.parse_args()
    # Every short fit would print the same notes about the machine again.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    results = measure(args.strategies, args.checkpoint, args.rounds, args.steps)
    if torch.distributed.get_rank() == 0:
        args.result.write_text(json.dumps({name: asdict(result) for name, result in results.items()}))


if __name__ == "__main__":
    main()
