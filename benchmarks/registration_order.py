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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.bucketing import NODES, Case, SleepingLayers, median_step
from benchmarks.machine import write_result
from benchmarks.measuring import quartiles, spread
from benchmarks.ranks import become_ranks, global_rank

LAYERS = Case([2_000_000] * 12, 0.3, 0.0, 0.0)
RUN = list(range(len(LAYERS.parameters)))
REGISTERED = {
    "as they run": RUN,
    "first layer last": [*RUN[1:], 0],
    "shuffled": random.Random(0).sample(RUN, len(RUN)),
    "reversed": RUN[::-1],
}
STRATEGIES = ("ddp", "zero1_custom")
WARM_UP = 3


class Registered(SleepingLayers):
    """Layers that are registered in a given order of their positions in forward."""

    def __init__(self, order: list[int]) -> None:
        super().__init__(LAYERS)
        layers = list(self.layers)
        # They keep their order in the list, which is no module any more.
        del self.layers
        self.registered = nn.ParameterList([layers[position] for position in order])
        vars(self)["layers"] = layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks per node; started here unless they run already")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="how often they take turns")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--label", default="local processes", help="for the result file")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    arguments = parser.parse_args()
    become_ranks(arguments.num_nodes, arguments.devices)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    NODES[0] = arguments.num_nodes
    seconds: dict[tuple[str, str], list[float]] = {one: [] for one in itertools.product(STRATEGIES, REGISTERED)}
    for _ in range(arguments.pairs):
        for (strategy, case), times in seconds.items():
            times.append(median_step(Registered(REGISTERED[case]), strategy, arguments.steps, WARM_UP))
    rows: dict[str, dict[str, Any]] = {strategy: {} for strategy in STRATEGIES}
    for (strategy, case), times in seconds.items():
        ratios = [one / base for one, base in zip(times, seconds[strategy, "as they run"], strict=True)]
        rows[strategy][case] = {**spread(times), "ratio": statistics.median(ratios), "quartiles": quartiles(ratios)}
    if global_rank() == 0:
        for strategy, case in seconds:
            row = rows[strategy][case]
            print(f"{strategy:14s} {case:18s} {row['median']:.3f} s  {row['ratio']:.3f} of the first", flush=True)
        write_result({"label": arguments.label, "step_time": rows}, arguments.output)


if __name__ == "__main__":
    main()
