"""One process plays one rank of up to 1,024 through a training, and counts what that costs.

    python -m benchmarks.scale.run --output benchmarks/results/scale_counts.json       # make scale
    python -m benchmarks.scale.run --sizes 64 1024 --saves none --no-calls

The Trainer, the strategy and everything below are the real ones; process groups are those of ``played_group.py``, which
send nothing. Writes the counters of every phase as JSON, and prints the tables of the page on scale. Nothing is timed.
"""

import argparse
import itertools
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

from benchmarks.machine import write_result
from benchmarks.scale.estimate import table as estimates
from benchmarks.scale.recorder import Recorder
from benchmarks.scale.training import Save, play
from lightning_parstrat.core.layout import Partition

SIZES = (8, 64, 1024)
_PHASES = ("setup", "step")
SHOWN = {
    "messages sent": "messages",
    "bytes sent": "sent_bytes",
    "pickled bytes received": "metadata_bytes",
    "largest buffer, bytes": "largest_receive_bytes",
    "Python calls": "calls",
}


def growth(by_size: Mapping[int, int]) -> float:
    """The power of the number of ranks by which a counter grows, from 64 on where two sizes are as large."""
    large = [size for size in sorted(by_size) if size >= 64]
    sizes = large if len(large) > 1 else sorted(by_size)
    few, many = by_size[sizes[0]], by_size[sizes[-1]]
    if not few:
        return math.inf if many else 0.0
    return math.log(many / few) / math.log(sizes[-1] / sizes[0]) if many and len(sizes) > 1 else 0.0


def rows(played: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[int, int]]]:
    """What each phase of ``zero1_custom`` costs rank 0."""
    phases: list[tuple[str, str, str | None]] = [(phase, phase, None) for phase in _PHASES]
    phases += [(f"{of} save", f"{of} save", of) for of in get_args(Save)]
    for title, phase, save in phases + [(f"load, {of}", "load", of) for of in get_args(Save)]:
        found = {
            one["size"]: one["counters"][phase]
            for one in played
            if one["rank"] == 0 and save in (None, one["save"]) and phase in one["counters"]
        }
        for name, counter in SHOWN.items() if found else ():
            yield f"{title}: {name}", {size: found[size][counter] for size in found}


def markdown(table: Sequence[tuple[str, Mapping[int, int]]]) -> Iterator[str]:
    """The lines of the table; a counter that is 0 everywhere has none."""
    sizes = sorted(table[0][1])
    yield f"| Rank 0 | {' | '.join(f'{size:,}' for size in sizes)} | grows by |"
    yield "|---" * (len(sizes) + 2) + "|"
    for title, by_size in table:
        if any(by_size.values()):
            cells = [f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k" for number in by_size.values()]
            yield f"| {title} | {' | '.join(cells)} | N^{round(growth(by_size), 2) + 0.0:.2f} |"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0], help="which are played; 0 first")
    parser.add_argument("--saves", choices=("none", *get_args(Save)), nargs="+", default=get_args(Save))
    parser.add_argument("--shard-group", type=int, help="how many ranks share a copy; by default all")
    parser.add_argument("--partition", choices=get_args(Partition), help="of zero1_custom")
    parser.add_argument("--no-calls", action="store_true", help="do not count calls of Python functions: faster")
    parser.add_argument("--output", type=Path, help="where to write the counters")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plays all that is asked for one after the other."""
    asked = _parse(arguments)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    given = {"partition": asked.partition, "shard_group": asked.shard_group}
    of_strategy = {name: value for name, value in given.items() if value is not None}
    played = []
    # In a save, what other ranks hear from rank 0 is known when that has been played.
    for save, rank, size in itertools.product(asked.saves, asked.ranks, asked.sizes):
        if rank < size:
            recorder = Recorder()
            with nullcontext() if asked.no_calls else recorder.counting_calls():
                play(of_strategy, None if save == "none" else save, recorder, rank, size)
            counters = {phase: counted.as_dict() for phase, counted in recorder.counters.items() if phase != "end"}
            played.append({"save": save, "size": size, "rank": rank, "counters": counters})
    table = list(rows(played))
    if asked.output is not None:
        write_result({"asked": json.loads(json.dumps(vars(asked), default=str)), "played": played}, asked.output)
    print(*(markdown(table) if table else ()), "", *estimates(), sep="\n")


if __name__ == "__main__":
    main()
