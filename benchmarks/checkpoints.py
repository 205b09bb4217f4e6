"""What a checkpoint costs: how long training stands still for it, and how much longer it takes in all.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints --output benchmarks/results/checkpoints.json

Trains in turns without saving and with each way of saving, and compares within a turn. The stall is what
`Trainer.save_checkpoint` takes; the whole cost is what a run with saves takes longer than one without, per save: for
async_save that has in it what the writing thread takes from training, and the wait for it at the end. The host's peak
is how much the resident set of rank 0 grows during a save, above what it was before.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, fit, make_decoder, quartiles, spread
from benchmarks.memory import forget_peak, held_at_peak, held_now
from benchmarks.peers import FORMATS
from benchmarks.ranks import become_ranks, global_rank

WITHOUT = "zero1_custom"


class Saves(Callback):
    """Saves after every few steps, and notes what that took."""

    def __init__(self, folder: Path, every: int, warm_up: int) -> None:
        self.folder, self.every, self.warm_up = folder, every, warm_up
        self.stalls: list[float] = []
        self.peaks: list[int] = []
        self.began = self.seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            dist.barrier()
            self.began = time.perf_counter()
        elif self.every and batch_idx > self.warm_up and (batch_idx - self.warm_up) % self.every == 1:
            dist.barrier()
            forget_peak("cpu")
            held = held_now("cpu")
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{len(self.stalls) % 2}.ckpt")
            self.stalls.append(time.perf_counter() - began)
            self.peaks.append(held_at_peak("cpu") - held)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # By now a save that was under way is done.
        self.seconds = time.perf_counter() - self.began


def measure(name: str, arguments: argparse.Namespace, folder: Path, every: int) -> Saves:
    """Trains under that strategy, saving after every so many steps, or not at all."""
    saves = Saves(folder, every, arguments.warm_up)
    if dist.is_initialized():
        dist.barrier()
    fit(name, arguments, [saves])
    return saves


def summarize(runs: dict[str, list[Saves]]) -> dict[str, Any]:
    """Seconds per save: those that training stands still, and those that a run takes longer; the host's peak."""
    without = [run.seconds for run in runs[WITHOUT]]
    summary: dict[str, Any] = {}
    synchronous = [stall for run in runs["zero1_custom(sharded)"] for stall in run.stalls]
    for name, measured in runs.items():
        if name == WITHOUT:
            continue
        stalls = [stall for run in measured for stall in run.stalls]
        costs = [(run.seconds - alone) / len(run.stalls) for run, alone in zip(measured, without, strict=True)]
        summary[name] = {
            "stall": spread(stalls),
            "stall_quartiles": quartiles(stalls),
            "ratio_to_synchronous": spread([a / b for a, b in zip(stalls, synchronous, strict=True)]),
            "whole_cost": spread(costs),
            "host_peak_bytes": spread([float(peak) for run in measured for peak in run.peaks]),
        }
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    add_arguments(parser)
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    if arguments.steps <= arguments.every:
        parser.error("--steps must be larger than --every: otherwise nothing is saved")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    names = [WITHOUT, *FORMATS]
    runs: dict[str, list[Saves]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        holder = [str(arguments.folder or temporary)]
        for _ in range(arguments.pairs):
            for name in names:
                if dist.is_initialized():
                    dist.broadcast_object_list(holder)
                # Apart: `ddp` would move its files into the folders of sharded checkpoints.
                folder = Path(holder[0]) / name
                runs[name].append(measure(name, arguments, folder, 0 if name == WITHOUT else arguments.every))
        dist.barrier()
    if global_rank() != 0:
        return
    parameters = sum(parameter.numel() for parameter in make_decoder(arguments).parameters())
    result = {"label": arguments.label, "parameters": parameters, "checkpoints": summarize(runs)}
    for name, cost in result["checkpoints"].items():
        print(
            f"{name:36s} stall {cost['stall']['median']:.3f} s ({cost['ratio_to_synchronous']['median']:.2f} of the"
            f" synchronous one), whole cost {cost['whole_cost']['median']:.3f} s,"
            f" host peak {cost['host_peak_bytes']['median'] / 1e6:.0f} MB"
        )
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
