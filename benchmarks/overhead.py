"""What a strategy costs the processor: a model of many small tensors, with next to nothing to compute or to send.

    python -m benchmarks.overhead --output benchmarks/results/overhead.json
    python -m benchmarks.overhead --tensors 8 --parameters 100000 --steps 300 --output benchmarks/results/small.json

Two local processes train 300 tensors with 1 million parameters in all, in short runs of each strategy in turns; each
run has processes of its own. Measured on rank 0 are each step's time, and what of it the main thread has computed
(``processor_time``): neither waiting nor other threads.

A run that fails is made again, and counted: a process of plain `ddp` may abort when it ends, where Gloo's threads
outlive the interpreter.

The ratio of medians has a bootstrap interval, in which runs, not steps, are drawn: steps of one run are no independent
samples.
"""

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import write_result
from benchmarks.measuring import StepTimes
from benchmarks.quiet import QUIET
from benchmarks.ranks import global_rank, run_local_ranks

RESAMPLES = 2000
MOST_FAILED = 3


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


def train(arguments: argparse.Namespace) -> None:
    """One run, in the process of one rank; rank 0 writes its times."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(0)
    module = ManySmallTensors(arguments.tensors, arguments.parameters)
    steps = arguments.warm_up + arguments.steps + 1
    times = StepTimes(arguments.warm_up)
    data = TensorDataset(torch.randn(2 * 8 * steps, module.width))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=arguments.strategies[0],
        max_steps=steps,
        gradient_clip_val=arguments.clip,
        callbacks=[times],
        **QUIET,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    if global_rank() == 0:
        found = {"step_time": times.kept(times.starts), "processor_time": times.kept(times.computed)}
        arguments.one_run.write_text(json.dumps(found))


def measure(strategy: str, arguments: argparse.Namespace) -> dict[str, list[float]] | None:
    """Seconds of one run, as rank 0 sees them: of each step. None if it failed."""
    shape = [str(value) for name in _SHAPE for value in (f"--{name.replace('_', '-')}", getattr(arguments, name))]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "run.json"
        options = ["--strategies", strategy, *shape, "--one-run", str(found)]
        code = run_local_ranks([sys.executable, "-m", "benchmarks.overhead", *options], 2)
        measured: dict[str, list[float]] | None = None if code else json.loads(found.read_text())
        return measured


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


def compare(strategies: list[str], runs: dict[str, list[dict[str, list[float]]]], measured: str) -> dict[str, Any]:
    """One of the measured times of all strategies, and its ratio to the first one's."""
    result: dict[str, Any] = {}
    base = [run[measured] for run in runs[strategies[0]]]
    for strategy in strategies:
        own = [run[measured] for run in runs[strategy]]
        medians = [statistics.median(run) for run in own]
        result[strategy] = {"medians_of_runs": medians, "median": statistics.median(medians)}
        if strategy != strategies[0]:
            result[strategy] |= ratio_with_interval(own, base)
            low, high = result[strategy]["interval_95_percent"]
            milliseconds = 1000 * result[strategy]["median"]
            print(
                f"{strategy}, {measured}: {milliseconds:.2f} ms, {result[strategy]['ratio']:.3f} of {strategies[0]}"
                f" ({low:.3f} to {high:.3f})"
            )
    return result


_SHAPE = ("tensors", "parameters", "steps", "warm_up", "clip")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1_custom"])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=10, help="of each strategy, in turns")
    parser.add_argument("--steps", type=int, default=30, help="on the clock in each run")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0, help="the norm that gradients are clipped to; 0 for none")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    parser.add_argument("--one-run", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.one_run is not None:
        train(arguments)
        return
    runs: dict[str, list[dict[str, list[float]]]] = {strategy: [] for strategy in arguments.strategies}
    failed = dict.fromkeys(arguments.strategies, 0)
    for _ in range(arguments.runs):
        for strategy in arguments.strategies:
            while (run := measure(strategy, arguments)) is None:
                failed[strategy] += 1
                if failed[strategy] > MOST_FAILED:
                    sys.exit(f"{failed[strategy]} runs of {strategy} have failed")
            runs[strategy].append(run)
    shape = {name: getattr(arguments, name) for name in _SHAPE}
    times = ("step_time", "processor_time")
    compared = {measured: compare(arguments.strategies, runs, measured) for measured in times}
    write_result({**shape, **compared, "failed_runs": failed}, arguments.output)


if __name__ == "__main__":
    main()
