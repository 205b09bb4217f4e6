"""The table of the page on scale: what each phase of a training costs rank 0, before and after.

    python -m benchmarks.scale.phases

Reads what ``run.py`` has counted, and what was counted before; measures nothing.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results"
SIZES = ("8", "64", "512", "1024")
COUNTERS = {
    "messages sent": "messages",
    "objects received, bytes": "metadata_bytes",
    "largest buffer, bytes": "largest_receive_bytes",
    "items": "items",
    "Python calls": "calls",
}


class Row(NamedTuple):
    """One counter of a phase, by number of ranks; ``before`` is empty where it was not counted."""

    phase: str
    counter: str
    after: Mapping[str, int]
    before: Mapping[str, int]

    @property
    def exponent(self) -> float:
        """The power of the number of ranks by which it grows from 64 to 1,024."""
        few, many = self.after["64"], self.after["1024"]
        if not few or not many:
            return math.copysign(math.inf, many - few) if few != many else 0.0
        return math.log(many / few) / math.log(1024 / 64)


def rows(results: Path = RESULTS) -> Iterator[Row]:
    """All rows, phase by phase.

    Args:
        results: The folder of ``scale_counts.json``; what was before stays where it is.
    """
    after = json.loads((results / "scale_counts.json").read_text())
    saves, start = (json.loads((RESULTS / f"scale_{name}_before.json").read_text()) for name in ("saves", "start"))
    start, started_after = start["zero1_custom"]["gloo"], after["zero1_custom"]["gloo"]
    # Items were not counted as early; of a replan, what each rank is told of does not depend on what carries it.
    items = saves["sharded save"]["nccl"]
    for title, phase in (("set-up", "setup"), ("replan", "replan")):
        for name, counter in COUNTERS.items():
            yield Row(title, name, _of(started_after, phase, counter), _of(start, phase, counter, items))
    for save in ("full save", "sharded save"):
        for phase in (save, "load"):
            title = phase if phase == save else f"load, {save.removesuffix(' save')}"
            of_save = after[save]["nccl"], saves[save]["nccl"]
            for name, counter in COUNTERS.items():
                yield Row(title, name, *(_of(found, phase, counter) for found in of_save))
        other = after[f"{save} of another rank"]["nccl"]
        yield Row(f"another rank, {save}", "messages sent", _of(other, save, "messages"), {})


def _of(found: Any, phase: str, counter: str, instead: Any = None) -> dict[str, int]:
    by_size = {size: found[size]["counters"][phase] for size in SIZES}
    if any(counter not in counters for counters in by_size.values()):
        return {} if instead is None else _of(instead, phase, counter)
    return {size: counters[counter] for size, counters in by_size.items()}


def markdown(table: Iterator[Row]) -> Iterator[str]:
    """The lines of the table; what was there before is in brackets."""
    yield "| Rank 0 | N = 8 | 64 | 512 | 1,024 | grows by |"
    yield "|---|---|---|---|---|---|"
    for row in table:
        cells = [
            f"{_short(row.after[size])} ({_short(row.before[size])})" if row.before else _short(row.after[size])
            for size in SIZES
        ]
        yield f"| {row.phase}: {row.counter} | {' | '.join(cells)} | {_power(row.exponent)} |"


def _short(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k"


def _power(exponent: float) -> str:
    # Without a sign where it is rounded to nothing.
    return f"N^{round(exponent, 2) + 0.0:.2f}" if math.isfinite(exponent) else "from 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    print(*markdown(rows(options.results)), sep="\n")


if __name__ == "__main__":
    main()
