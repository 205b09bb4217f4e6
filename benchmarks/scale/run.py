"""The laboratory in one go: what a training costs from 2 to 1,024 ranks, in about ten minutes on two cores.

    make scale

- One process plays one rank of up to 1,024 and counts launches, waits, messages, calls, metadata (``fake_ranks.py``).
- Real ranks, forked from one process, are counted over Gloo: sockets and processor time (``real_ranks.py``).
- Steps of two models are played through on a model of NCCL (``study.py``, ``cap_study.py``), in shard groups as a
  played rank has recorded them (``group_study.py``).

Writes ``scale_counts.json``, ``scale_nccl.json``, ``scale_caps.json``, ``scale_whole.json`` (parameters that stay
uncut) and ``scale_groups.json`` into the folder of results, draws the picture of the page on scale, and prints how
every counter of a step grows, and that page's table of the other phases.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Scripts beside each other, which import each other so.
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import write_result  # noqa: E402
from ranks import COMMAND_VARIABLE  # noqa: E402

from benchmarks.scale.phases import markdown, rows  # noqa: E402

PLAYED = (2, 8, 64, 512, 1024)
SAVED = (8, 64, 512, 1024)
OTHER = 5
"""A rank that is not rank 0, in a save; those of other numbers do the same."""
FORKED = (2, 8, 32)
GROWTH = (64, 1024)


def program(name: str, *arguments: str) -> None:
    """Runs one part of the laboratory; what it prints is shown."""
    print(f"{name} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.scale.{name}", *arguments], cwd=ROOT, check=True)


def played(
    folder: Path, strategy: str, sizes: tuple[int, ...], planes: tuple[str, ...], *more: str, rank: int = 0
) -> dict[str, Any]:
    """Counters of a rank by plane, size and phase."""
    output = folder / "played.json"
    asked = ["--strategy", strategy, "--sizes", *map(str, sizes), "--planes", *planes]
    # In a save, what other ranks hear from rank 0 is known when that has been played.
    asked += ["--ranks", "0", str(rank)] if rank else []
    program("fake_ranks", *asked, *more, "--output", str(output))
    found = json.loads(output.read_text())
    return {
        plane: {
            str(one["size"]): {"counters": one["counters"], "sockets": one["sockets"]}
            for one in found[plane]["played"]
            if one["rank"] == rank
        }
        for plane in planes
    }


def growth(folder: Path, *more: str) -> dict[str, Any]:
    """The exponents of all counters, by plane and phase."""
    output = folder / "growth.json"
    program("fake_ranks", "--sizes", *map(str, GROWTH), *more, "--output", str(output))
    found = json.loads(output.read_text())
    return {plane: of_plane["exponents"] for plane, of_plane in found.items() if plane != "asked"}


def forked(folder: Path) -> dict[str, Any]:
    """Sockets of a rank and its processor time in a settled step, by strategy and size: medians over ranks."""
    output = folder / "forked.json"
    program("real_ranks", "--sizes", *map(str, FORKED), "--output", str(output))
    return {
        strategy: {
            size: {name: statistics.median(rank[name] for rank in ranks) for name in ("sockets", "cpu_seconds")}
            for size, ranks in by_size.items()
        }
        for strategy, by_size in json.loads(output.read_text()).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/pictures/scale.svg")
    options = parser.parse_args()
    os.environ[COMMAND_VARIABLE] = "make scale"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counted = {
            "forked": forked(folder),
            "zero1_custom": played(folder, "zero1_custom", PLAYED, ("gloo", "nccl")),
            "ddp": played(folder, "ddp", PLAYED, ("nccl",)),
            **{
                f"{save} save{of}": played(folder, "zero1_custom", SAVED, ("nccl",), "--save", save, rank=rank)
                for save in ("full", "sharded")
                for of, rank in (("", 0), (" of another rank", OTHER))
            },
            "exponents_64_to_1024": growth(folder, "--planes", "gloo", "nccl"),
        }
    write_result(counted, options.results / "scale_counts.json")
    program("study", "--output", str(options.results / "scale_nccl.json"), "--picture", str(options.picture))
    program("cap_study", "--output", str(options.results / "scale_caps.json"))
    program("whole_study", "--output", str(options.results / "scale_whole.json"))
    program("group_study", "--output", str(options.results / "scale_groups.json"))
    print(*markdown(rows(options.results)), sep="\n")


if __name__ == "__main__":
    main()
