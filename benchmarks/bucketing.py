"""Buckets of DDP: torch's default, caps from 1 to 64 MB, and what `ddp_tuned` finds by itself.

    python -m benchmarks.bucketing --output benchmarks/results/bucketing.json
    sudo python -m benchmarks.two_nodes --rate 1gbit -- \\
        python -m benchmarks.bucketing --num-nodes 2 --devices 1 --wire real --label "two nodes, 1 Gbit/s" \\
        --output benchmarks/results/bucketing_1gbit.json

Each case is a module whose layers sleep, as if an accelerator computed, on a wire of which latency and rate are given
(`slow_wire.py`; with `--wire real`, on the one that is there). `ddp_tuned` tunes once; then all take turns, steps
against steps.
"""

import argparse
import logging
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.emulated import Sleep
from benchmarks.machine import write_result
from benchmarks.measuring import StepTimes, quartiles, spread
from benchmarks.quiet import QUIET
from benchmarks.ranks import become_ranks, global_rank
from benchmarks.slow_wire import SlowWire
from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core.tuning import TuningReport

CAPS = (1.0, 4.0, 16.0, 64.0)
TUNING_STEPS = 70


class Case(NamedTuple):
    """A module and a wire: elements of each parameter in the order of forward, and what a forward takes."""

    parameters: list[int]
    forward_seconds: float
    latency_seconds: float
    seconds_per_byte: float
    by_size: bool = True
    """Whether a layer sleeps as long as it has elements, or all of them alike."""


def gpt(width: int = 448, depth: int = 4, vocabulary: int = 1792, length: int = 128) -> list[int]:
    """The 50 parameters of a decoder with a tied head: 10.5 million elements."""
    square = width * width
    norm = [width, width]
    layer = [3 * square, 3 * width, square, width, 4 * square, 4 * width, 4 * square, width, *norm, *norm]
    return [vocabulary * width, length * width, *layer * depth]


CASES = {
    "gpt": Case(gpt(), 0.33, 5e-4, 8e-9),
    "uniform layers": Case([400_000] * 24, 0.24, 1e-3, 8e-9),
    "late large tensor": Case([3_000_000, *[100_000] * 30], 0.12, 1e-3, 8e-9, by_size=False),
    "many small tensors": Case([20_000] * 60, 0.06, 2e-3, 8e-9),
    "delay per collective": Case([300_000] * 16, 0.12, 1e-2, 8e-9),
    "bandwidth-bound": Case([1_000_000] * 12, 0.024, 1e-3, 1.6e-8),
    "hidden anyway": Case([20_000] * 20, 0.1, 1e-4, 1e-9),
}


class SleepingLayers(LightningModule):
    """Layers of one parameter each, that sleep instead of computing."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in case.parameters])
        shares = [float(size) if case.by_size else 1.0 for size in case.parameters]
        self.seconds = [case.forward_seconds * share / sum(shares) for share in shares]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.zeros(1)
        for parameter, seconds in zip(self.layers, self.seconds, strict=True):
            hidden = Sleep.apply(hidden, seconds, parameter)
        return hidden.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(case: Case, group: Any, bucket_cap_mb: Any, steps: int, warm_up: int) -> tuple[float, TuningReport | None]:
    """The median step with these buckets, None for the default's; and what tuning has found."""
    strategy: Strategy
    if bucket_cap_mb is None:
        strategy = DDPStrategy(process_group=group, gradient_as_bucket_view=True)
    else:
        strategy = TunedDDPStrategy(process_group=group, bucket_cap_mb=bucket_cap_mb)
    seconds = median_step(SleepingLayers(case), strategy, steps, warm_up)
    return seconds, getattr(strategy, "tuning_report", None)


def median_step(module: LightningModule, strategy: Strategy | str, steps: int, warm_up: int) -> float:
    """The median step of a training, after the first ones. All ranks begin together."""
    times = StepTimes(warm_up)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() // NODES[0],
        num_nodes=NODES[0],
        strategy=strategy,
        max_steps=warm_up + steps,
        callbacks=[times],
        **QUIET,
    )
    dist.barrier()
    trainer.fit(module, DataLoader(torch.zeros((warm_up + steps) * dist.get_world_size(), 1)))
    return statistics.median(times.kept(times.starts))


NODES = [1]


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row: the tuning, and the turns after it."""
    factor, group = arguments.scale, None
    case = case._replace(
        forward_seconds=factor * case.forward_seconds,
        latency_seconds=factor * case.latency_seconds,
        seconds_per_byte=factor * case.seconds_per_byte,
    )
    if arguments.wire == "emulated":
        group = SlowWire(dist.group.WORLD, case.latency_seconds, case.seconds_per_byte)
    _, report = train(case, group, "auto", TUNING_STEPS, 0)
    if report is None:
        raise AssertionError(f"tuning was not over after {TUNING_STEPS} steps")
    candidates: dict[str, Any] = {"default": None, **{f"{cap:g} MB": cap for cap in CAPS}}
    candidates["tuned"] = report.bucket_cap_mb
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(arguments.pairs):
        for name, caps in candidates.items():
            seconds[name].append(train(case, group, caps, arguments.steps, 3)[0])
    return summarize(seconds, report)


def summarize(seconds: dict[str, list[float]], report: TuningReport) -> dict[str, Any]:
    """Medians and ratios turn by turn."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((name for name in seconds if name.endswith(" MB")), key=lambda name: medians[name])

    def ratio(other: str) -> dict[str, Any]:
        ratios = [tuned / time for tuned, time in zip(seconds["tuned"], seconds[other], strict=True)]
        return {"median": statistics.median(ratios), "quartiles": quartiles(ratios)}

    return {
        "verdict": report.verdict,
        "reason": report.reason,
        "seconds": {name: spread(times) for name, times in seconds.items()},
        "best_scalar": best,
        "tuned_to_default": ratio("default"),
        "tuned_to_best_scalar": ratio(best),
        "tried_seconds": {str(cap): tried for cap, tried in report.tried},
        "realised_gain": medians["default"] - medians["tuned"],
        "tuning_steps": report.steps,
        "bucket_cap_mb": report.bucket_cap_mb,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--wire", choices=["emulated", "real"], default="emulated")
    parser.add_argument("--devices", type=int, default=2, help="ranks per node; started here unless they run already")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3, help="how often they take turns")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--scale", type=float, default=1.0, help="what all seconds of a case are multiplied by")
    parser.add_argument("--label", default="local processes, emulated wire", help="for the result file")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    NODES[0] = arguments.num_nodes
    rows = {}
    for name in arguments.cases:
        row = rows[name] = measure(CASES[name], arguments)
        if global_rank() == 0:
            seconds = {key: round(value["median"], 4) for key, value in row["seconds"].items()}
            print(
                f"{name:22s} {row['verdict']:18s} tuned/default {row['tuned_to_default']['median']:.3f},"
                f" tuned/{row['best_scalar']} {row['tuned_to_best_scalar']['median']:.3f}, {seconds},"
                f" {row['tuning_steps']} steps of tuning",
                flush=True,
            )
    if global_rank() == 0:
        write_result({"label": arguments.label, "wire": arguments.wire, "cases": rows}, arguments.output)


if __name__ == "__main__":
    main()
