"""What a checkpoint costs: how long training stands still for it, and how much longer it takes in all.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints --output benchmarks/results/checkpoints.json

Trains in turns without saving and with each way of saving, and compares within a turn. The stall is what
`Trainer.save_checkpoint` takes; the whole cost is what a run with saves takes longer than one without, per save: for
async_save that has in it what the writing thread takes from training, and the wait for it at the end. The host's peak
is how much the resident set of rank 0 grows during a save, above what it was before. At the end a thread asks to be
woken every millisecond while checkpoints are saved: the delay is how late it is, of a thousand times but one, on the
rank where that is longest, less its delay in as long a time without saves.
"""

import argparse
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, fit, make_decoder, quartiles, spread
from benchmarks.memory import forget_peak, held_at_peak, held_now
from benchmarks.peers import FORMATS
from benchmarks.ranks import become_ranks, global_rank

WITHOUT = "zero1_custom"
TICK = 0.001
TICKED_SAVES = 4


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
            forget_peak()
            held = held_now()
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{len(self.stalls) % 2}.ckpt")
            self.stalls.append(time.perf_counter() - began)
            self.peaks.append(held_at_peak() - held)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # By now a save that was under way is done.
        self.seconds = time.perf_counter() - self.began


class Ticks(Callback):
    """How late a thread wakes up that asks to be woken every millisecond: while checkpoints are saved, and without."""

    def __init__(self, folder: Path, warm_up: int) -> None:
        self.folder, self.warm_up = folder, warm_up
        self.during = self.without = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            # What a first save imports and connects is not what later ones cost.
            self._save(trainer)
            began = time.perf_counter()
            self.during = delay_during(lambda: [self._save(trainer) for _ in range(TICKED_SAVES)])
            seconds = time.perf_counter() - began
            self.without = delay_during(lambda: time.sleep(seconds))

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.folder / "ticks.ckpt")
        trainer.strategy.wait_for_saves()


def delay_during(action: Callable[[], Any]) -> float:
    """The 99.9th percentile of the delays of a ticking thread while something is done, in seconds."""
    late: list[float] = []
    ends = threading.Event()

    def tick() -> None:
        while not ends.is_set():
            began = time.perf_counter()
            time.sleep(TICK)
            late.append(time.perf_counter() - began - TICK)

    thread = threading.Thread(target=tick)
    thread.start()
    action()
    ends.set()
    thread.join()
    return float(torch.tensor(late).quantile(0.999))


def tick_delays(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """By way of saving: the delay that saving adds, of each pair the longest of all ranks."""
    found: dict[str, list[float]] = {name: [] for name in FORMATS if name != "ddp"}
    for _ in range(arguments.pairs):
        for name, delays in found.items():
            ticks = Ticks(folder / name, arguments.warm_up)
            fit(name, arguments, [ticks])
            longest = torch.tensor(ticks.during - ticks.without)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            delays.append(float(longest))
    return {name: spread(delays) for name, delays in found.items()}


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
        dist.broadcast_object_list(holder)
        ticks = tick_delays(arguments, Path(holder[0]))
        dist.barrier()
    if global_rank() != 0:
        return
    parameters = sum(parameter.numel() for parameter in make_decoder(arguments).parameters())
    result = {"label": arguments.label, "parameters": parameters, "checkpoints": summarize(runs)}
    result["tick_delay_seconds"] = ticks
    for name, cost in result["checkpoints"].items():
        print(
            f"{name:36s} stall {cost['stall']['median']:.3f} s ({cost['ratio_to_synchronous']['median']:.2f} of the"
            f" synchronous one), whole cost {cost['whole_cost']['median']:.3f} s,"
            f" host peak {cost['host_peak_bytes']['median'] / 1e6:.0f} MB"
        )
    for name, delay in ticks.items():
        print(f"{name:36s} a thread wakes up {1000 * delay['median']:.1f} ms later while it is saved")
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
