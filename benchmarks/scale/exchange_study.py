"""From how many CPU ranks on rounds take less of the processors than a message for every pair of ranks.

    python -m benchmarks.scale.exchange_study --output benchmarks/results/scale_exchange.json

Real ranks over Gloo, forked from one process (``real_ranks.py``), train by pairs, in rounds and under DDP, in turns.
Counted are sockets, messages that Python launches, and processor time of all threads in a settled step, which does not
depend on who else waits for the processors as a step's duration does. Medians over the runs of the mean over ranks.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.scale.fake_ranks import silence
from benchmarks.scale.models import small
from benchmarks.scale.real_ranks import allow_many_files, run
from benchmarks.scale.training import SETTLED, StrategyName, Training
from lightning_parstrat.core import halving

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import write_result


class Way(NamedTuple):
    """How gradients travel.

    Attributes:
        strategy: Whose.
        most_by_pairs: Up to how many ranks each sends every other one a message.
    """

    strategy: StrategyName
    most_by_pairs: int


WAYS = {"by pairs": Way("zero1_custom", 2**20), "in rounds": Way("zero1_custom", 1), "ddp": Way("ddp", 0)}


def study(
    ways: Sequence[str], sizes: Sequence[int], runs: int, steps: int, ranks_per_node: int, elements: int
) -> dict[str, Any]:
    """What one rank has cost, by way and number of ranks.

    Args:
        ways: Of :data:`WAYS`.
        sizes: Numbers of ranks.
        runs: How many times each is run, in turns.
        steps: Settled steps of a run.
        ranks_per_node: How many behave as if they shared a node.
        elements: Of each of the 60 tensors, of which a bucket holds 16.
    """
    shapes = small(elements=elements)
    cap_mb = 16 * elements * 4 / 2**20
    found: dict[str, Any] = {way: {} for way in ways}
    for size in sizes:
        for number in range(runs):
            # A run that comes later finds caches warmer, or a machine busier: not always the same one.
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                strategy, most = WAYS[way]
                training = Training(strategy, shapes, cap_mb, steps, ranks_per_node=ranks_per_node)
                with mock.patch.object(halving, "MOST_BY_PAIRS", most):
                    ranks = run(training, size)
                of_size = found[way].setdefault(size, {"cpu_ms_of_runs": []})
                mean = sum(one.cpu_seconds for one in ranks) / size
                of_size["cpu_ms_of_runs"].append(round(mean * 1e3, 2))
                of_size["cpu_ms"] = statistics.median(of_size["cpu_ms_of_runs"])
                of_size["sockets"] = max(one.sockets for one in ranks)
                sent = [ranks[0].launches.get(f"{group} send", 0) for group in ("gradients", "parameters")]
                of_size["messages_a_step"] = sum(sent) // (SETTLED + steps + 1)
        print(size, {way: found[way][size] for way in ways}, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Runs the study and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="settled steps of a run")
    parser.add_argument("--ranks-per-node", type=int, default=2**20, help="how many behave as if they shared a node")
    parser.add_argument("--elements", type=int, nargs="+", default=[4096], help="of each of the 60 tensors")
    parser.add_argument("--output", type=Path, help="where to write the result")
    asked = parser.parse_args()
    silence()
    allow_many_files()
    shared = asked.ways, asked.sizes, asked.runs, asked.steps, asked.ranks_per_node
    found = {f"60 tensors of {elements}": study(*shared, elements) for elements in asked.elements}
    write_result({"exchange": found}, asked.output)


if __name__ == "__main__":
    main()
