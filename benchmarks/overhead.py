"""What a strategy costs the processor: a model of many small tensors, with next to nothing to compute or to send.

    python benchmarks/overhead.py --output benchmarks/results/overhead.json

Two local processes train 300 tensors with 1 million parameters in all, in short runs of each strategy in turns. Each
step is timed; the ratio of medians has a bootstrap interval, in which runs, not steps, are drawn: steps of one run are
no independent samples.
"""

import argparse
import logging
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import write_result
from ranks import become_ranks, global_rank
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

RESAMPLES = 2000


class ManySmallTensors(LightningModule):
    """Linear layers with a weight and a bias each."""

    def __init__(self, tensors: int, parameters: int) -> None:
        super().__init__()
        layers = tensors // 2
        self.width = round((parameters / layers) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (hidden,) = batch
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class StepTimes(Callback):
    """The time from each batch's start to the next one's, but for the first few."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        kept = self.starts[self.warm_up :]
        return [after - before for before, after in pairwise(kept)]


def measure(strategy: str, arguments: argparse.Namespace) -> list[float]:
    """Seconds of each step of one run, as this rank sees them."""
    if dist.is_initialized():
        dist.barrier()
    torch.manual_seed(0)
    module = ManySmallTensors(arguments.tensors, arguments.parameters)
    steps = arguments.warm_up + arguments.steps + 1
    times = StepTimes(arguments.warm_up)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(2 * 8 * steps, module.width))
    trainer.fit(module, DataLoader(data, batch_size=8))
    return times.seconds


def ratio_with_interval(ours: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    """The ratio of the medians over all steps, and the middle 95 % of it over resampled runs."""
    draw = random.Random(0)

    def median_of(runs: list[list[float]]) -> float:
        return statistics.median(second for run in runs for second in run)

    ratios = []
    for _ in range(RESAMPLES):
        picked = [draw.randrange(len(ours)) for _ in ours]
        ratios.append(median_of([ours[i] for i in picked]) / median_of([base[i] for i in picked]))
    ratios.sort()
    interval = [ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]]
    return {"ratio": median_of(ours) / median_of(base), "interval_95_percent": interval}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1_custom"])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=10, help="of each strategy, in turns")
    parser.add_argument("--steps", type=int, default=30, help="on the clock in each run")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    become_ranks(1, 2)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seconds: dict[str, list[list[float]]] = {strategy: [] for strategy in arguments.strategies}
    for _ in range(arguments.runs):
        for strategy, runs in seconds.items():
            runs.append(measure(strategy, arguments))
    if global_rank() != 0:
        return
    base = seconds[arguments.strategies[0]]
    result: dict[str, Any] = {}
    for strategy, runs in seconds.items():
        medians = [statistics.median(run) for run in runs]
        result[strategy] = {"medians_of_runs": medians, "median": statistics.median(medians)}
        if runs is not base:
            result[strategy] |= ratio_with_interval(runs, base)
            low, high = result[strategy]["interval_95_percent"]
            print(f"{strategy}: {result[strategy]['ratio']:.3f} of {arguments.strategies[0]} ({low:.3f} to {high:.3f})")
    shape = {"tensors": arguments.tensors, "parameters": arguments.parameters, "steps": arguments.steps}
    write_result({**shape, "step_time": result}, arguments.output)


if __name__ == "__main__":
    main()
