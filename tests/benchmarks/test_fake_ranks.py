"""What a step costs at 8, 64 and 512 ranks, by formulas: a played rank counts its launches, messages and buffers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import estimate
from benchmarks.scale.run import growth, markdown, rows
from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = [16, 16, 16, 12]
"""Tensors of 16 KiB in each bucket of 0.25 MiB."""
BUCKET_BYTES = max(BUCKETS) * 16 * 2**10
AGREEMENTS = 8
"""Of a setup: whether modules and plans are the same, whether all ranks resume, who shares a node and so on."""


def counted_by(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    output = folder / "counted.json"
    program = ["-m", "benchmarks.scale.run", "--no-calls", "--output", str(output)]
    ran = run_python([*program, *arguments], ROOT)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    played: list[dict[str, Any]] = json.loads(output.read_text())["played"]
    return played


def by_rank(played: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(one["size"], one["rank"]): one["counters"] for one in played}


def parts_of(rank: int, size: int) -> int:
    """Of how many tensors a rank's shards have a part."""
    bounds = [(rank * tensors // size, -(-(rank + 1) * tensors // size)) for tensors in BUCKETS]
    return sum(last - first for first, last in bounds)


def doublings(size: int) -> int:
    return int(math.log2(size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "layout", "more"),
    [
        ("8 64 512", "", {}),
        ("64 512", "--partition parameter", {"gradients all_to_all": 4, "parameters all_to_all": 4}),
        ("64 512", "--shard-group 8", {"gradients all_reduce": 4}),
    ],
    ids=["elements", "whole parameters", "shard groups"],
)
def test_a_step_sends_what_the_formulas_say_on_whatever_rank(
    sizes: str, layout: str, more: dict[str, int], tmp_path: Path
) -> None:
    asked = f"--sizes {sizes} --ranks 0 37 --saves none {layout}"
    for (size, rank), counters in by_rank(counted_by(tmp_path, *asked.split())).items():
        step, setup = counters["step"], counters["setup"]
        # One collective a bucket each way, one message of control, and nothing else.
        launches = {
            name: number for name, number in step["launches"].items() if name.split()[1] not in ("send", "recv")
        }
        expected = {"gradients reduce_scatter": len(BUCKETS), "parameters all_gather": len(BUCKETS), **more}
        assert launches == expected, (size, rank)
        assert step["messages"] == doublings(size)
        # An owner of whole matrices receives what it owns, and its equal part; N copies would be far more.
        assert step["largest_receive_bytes"] <= 2 * BUCKET_BYTES
        if not layout:
            assert step["metadata_bytes"] == step["groups"] == 0
            assert setup["messages"] == AGREEMENTS * doublings(size)
            # What is received is who shares a node, and on other ranks than 0 the first weights.
            weights = sum(BUCKETS) * 2**14 if rank else 0
            assert setup["groups"] == 4 and setup["largest_receive_bytes"] <= weights + 8 * size


@pytest.mark.slow
@pytest.mark.parametrize("save", ["full", "sharded"])
def test_a_save_and_a_load(save: str, tmp_path: Path) -> None:
    asked = ["--sizes", "8", "64", "--ranks", "0", "5", "--saves", save]
    counted = by_rank(counted_by(tmp_path, *asked))
    for (size, rank), counters in counted.items():
        saved = counters[f"{save} save"]
        # All come, and agree on what there is of the state and whether training can go on from it; then whether the
        # file was written. Of a folder torch agrees on that, by collectives.
        agreements = 3 if save == "sharded" else 4
        # A rank describes its state in two messages, and sends its random numbers in two. In a full save, it sends
        # rank 0 both moments of each tensor that it has a part of.
        gathered = (4 + 2 * parts_of(rank, size) * (save == "full")) * (rank > 0)
        assert saved["messages"] == agreements * doublings(size) + gathered
        # Rank 0 receives random numbers; of a folder, it says what is in it, and receives a few words of each rank.
        assert (saved["metadata_bytes"] > 0) == (save == "sharded" or rank == 0)
        assert saved["metadata_bytes"] < (15_000 * size if rank == 0 else 20_000)
        if rank == 0:
            # Whether all could read it, and which save's it is; of a folder, whether all could read optimizers' states.
            assert counters["load"]["messages"] == (2 if save == "full" else 3) * doublings(size)
            assert counters["load"]["metadata_bytes"] == 0
    buffers = [counted[size, 0][f"{save} save"]["largest_receive_bytes"] for size in (8, 64)]
    assert buffers[1] <= (1500 * 64 if save == "sharded" else buffers[0])


def test_the_page_has_the_tables_of_what_was_counted_and_estimated() -> None:
    page = (ROOT / "docs/scale.md").read_text()
    counted = json.loads((ROOT / "benchmarks/results/scale_counts.json").read_text())
    table = list(rows(counted["played"]))
    assert "\n".join(markdown(table)) in page
    assert "\n".join(estimate.table()) in page
    for title, by_size in table:
        # With the logarithm at most, but for a few words of each rank in a sharded save, and one at setup: its node.
        few = title == "sharded save: largest buffer, bytes" and by_size[1024] < 1500 * 1024
        few |= title.startswith("setup") and by_size[1024] <= 8 * 1024
        assert growth(by_size) <= 0.25 or few or ("messages" not in title and "buffer" not in title), title
