"""Step time of strategies through Lightning's Trainer, interleaved in one run (A B A B).

On local processes:   python benchmarks/step_time.py --devices 2
As one of two nodes:  set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun does, --num-nodes 2 --devices 1

A step's time is the wall time of a run of steps divided by their number, so that whatever communication runs on into
the next step is inside the clock. Medians with minimum and maximum, and ratios to the first strategy pair by pair.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, RandomTokens
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import describe_machine
from torch.utils.data import DataLoader


class Stopwatch(Callback):
    """Wall time of the steps after the first few, which allocate and settle."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.steps = 0
        self.started = self.seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.steps == self.warm_up:
            self.started = time.perf_counter()
        self.steps += 1

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seconds = (time.perf_counter() - self.started) / (self.steps - self.warm_up)


def measure(strategy: str, arguments: argparse.Namespace) -> float:
    """Seconds per optimizer micro-batch step under ``strategy``, as this rank sees them."""
    torch.manual_seed(0)
    module = GPT(width=arguments.width, depth=arguments.depth)
    stopwatch = Stopwatch(arguments.warm_up)
    steps = arguments.warm_up + arguments.steps
    ranks = arguments.num_nodes * arguments.devices
    data = RandomTokens(steps * arguments.batch_size * ranks, 128, 8192)
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=strategy,
        max_steps=steps // arguments.accumulate,
        gradient_clip_val=arguments.clip,
        accumulate_grad_batches=arguments.accumulate,
        callbacks=[stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=arguments.batch_size))
    return stopwatch.seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Median, minimum and maximum per strategy, and the ratio to the first one within each pair, with its quartiles."""
    first = next(iter(seconds))
    summary: dict[str, Any] = {}
    for strategy, times in seconds.items():
        ratios = [time / base for time, base in zip(times, seconds[first], strict=True)]
        quartiles = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        summary[strategy] = {
            "seconds": times,
            "median": statistics.median(times),
            "min": min(times),
            "max": max(times),
            f"ratio_to_{first}": statistics.median(ratios),
            f"ratio_to_{first}_quartiles": [quartiles[0], quartiles[2]],
        }
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1_custom"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--pairs", type=int, default=3, help="how often the strategies take turns")
    parser.add_argument("--steps", type=int, default=8, help="steps on the clock")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of 128 tokens per rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--label", default="local processes", help="what the ranks ran on, for the result file")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    seconds: dict[str, list[float]] = {strategy: [] for strategy in arguments.strategies}
    for _ in range(arguments.pairs):
        for strategy in arguments.strategies:
            seconds[strategy].append(measure(strategy, arguments))
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) != 0:
        return
    result = {"label": arguments.label, "machine": describe_machine(), "step_time": summarize(seconds)}
    for strategy, times in result["step_time"].items():
        ratio = next(value for key, value in times.items() if key.startswith("ratio"))
        print(
            f"{strategy:20s} {times['median']:.3f} s  ({times['min']:.3f} to {times['max']:.3f})  {ratio:.3f} of first"
        )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
