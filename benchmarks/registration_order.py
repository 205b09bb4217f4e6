"""What it costs if layers run in another order than that in which they are registered.

    sudo python -m benchmarks.two_nodes --rate 1gbit -- \\
        python -m benchmarks.registration_order --num-nodes 2 --devices 1 --label "two nodes, 1 Gbit/s" \\
        --output benchmarks/results/registration_order_1gbit.json

Layers sleep instead of computing, as if an accelerator computed. The same layers run in the same order in every case;
what differs is the order of registration. All cases take turns, steps against steps.
"""

import argparse
import itertools
import logging
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.emulated import Sleep
from benchmarks.machine import write_result
from benchmarks.measuring import quartiles, spread
from benchmarks.ranks import become_ranks, global_rank

LAYERS = 12
WARM_UP = 3


def registered(case: str) -> list[int]:
    """The layers, by their position in forward, in the order of registration."""
    order = list(range(LAYERS))
    if case == "first layer last":
        return [*order[1:], 0]
    if case == "reversed":
        return order[::-1]
    if case == "shuffled":
        random.Random(0).shuffle(order)
    return order


CASES = ("as they run", "first layer last", "shuffled", "reversed")
STRATEGIES = ("ddp", "zero1_custom")


class Layers(LightningModule):
    """Layers of one parameter each, that sleep instead of computing.

    Args:
        order: Positions in forward, in the order of registration.
        elements: Of each layer.
        seconds: What a forward takes; a backward takes twice that.
    """

    def __init__(self, order: list[int], elements: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): _one(elements) for at in order})
        self.seconds = seconds / len(order)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.zeros(1)
        for at in range(len(self.layers)):
            hidden = Sleep.apply(hidden, self.seconds, *self.layers[str(at)].parameters())
        return hidden.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _one(elements: int) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(elements))])


class StepTimes(Callback):
    """When each step began, after the first few."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= WARM_UP:
            self.began.append(time.perf_counter())

    def median(self) -> float:
        """The median step."""
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(self.began))


def train(strategy: str, case: str, arguments: argparse.Namespace) -> float:
    """The median step."""
    times = StepTimes()
    steps = WARM_UP + arguments.steps
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=strategy,
        max_steps=steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Layers(registered(case), arguments.elements, arguments.forward_seconds)
    dist.barrier()
    trainer.fit(module, DataLoader(torch.zeros(steps * dist.get_world_size(), 1)))
    return times.median()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks per node; started here unless they run already")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="how often they take turns")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--elements", type=int, default=2_000_000, help="of each layer")
    parser.add_argument("--forward-seconds", type=float, default=0.3, help="what a forward takes")
    parser.add_argument("--label", default="local processes", help="for the result file")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds: dict[tuple[str, str], list[float]] = {one: [] for one in itertools.product(STRATEGIES, CASES)}
    for _ in range(arguments.pairs):
        for (strategy, case), times in seconds.items():
            times.append(train(strategy, case, arguments))
    rows: dict[str, dict[str, Any]] = {strategy: {} for strategy in STRATEGIES}
    for (strategy, case), times in seconds.items():
        ratios = [one / base for one, base in zip(times, seconds[strategy, CASES[0]], strict=True)]
        rows[strategy][case] = {**spread(times), "ratio": statistics.median(ratios), "quartiles": quartiles(ratios)}
        if global_rank() == 0:
            print(
                f"{strategy:14s} {case:18s} {statistics.median(times):.3f} s  {statistics.median(ratios):.3f}",
                flush=True,
            )
    if global_rank() == 0:
        write_result({"label": arguments.label, "step_time": rows}, arguments.output)


if __name__ == "__main__":
    main()
