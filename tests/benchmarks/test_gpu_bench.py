"""The benchmark of GPUs, on CPUs: every row runs, merges and fails as it would there, whatever it measures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.rows import ONE_RANK, TWO_RANKS, all_rows
from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
from benchmarks.gpu.results import lines_of, summarize  # noqa: E402


def run(output: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, what was printed, and the rows of the result file."""
    program = [ROOT / "benchmarks/gpu/run.py", "--device", "cpu", "--output", output, "--warm-up", "3", "--steps", "2"]
    ran = run_python([*program, *arguments], output.parent, timeout=400)
    rows = json.loads(output.read_text())["rows"] if output.is_file() else {}
    return ran.returncode, ran.stdout + ran.stderr, rows


def is_measured(one: dict[str, Any]) -> bool:
    host, launches = one["host_seconds"], one["launches"]
    times = [turn["seconds"] for turn in one["turns"]] + [host[phase] for phase in ("forward", "backward", "step")]
    return all(math.isfinite(seconds) and seconds > 0 for seconds in times) and launches["operators"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "contenders"),
    [
        ("world1-tiny-bf16-mixed", ONE_RANK),
        ("ranks2-tiny-bf16-mixed", TWO_RANKS),
        ("fake8-tiny-bf16-mixed", None),
    ],
)
def test_a_row(row: str, contenders: tuple[str, ...] | None, tmp_path: Path) -> None:
    code, printed, rows = run(tmp_path / "found.json", "--rows", row, "--turns", "2" if row.startswith("w") else "1")
    assert code == 0, printed
    found = rows[row]["contenders"]
    assert contenders is None or tuple(found) == contenders
    assert all(is_measured(one) for one in found.values())
    ours = found["zero1_custom"]
    assert {"torch", "lightning-parstrat", "command", "processor"} <= rows[row]["machine"].keys()
    if row.startswith("world1"):
        assert ours["host_seconds"]["pack"] > 0 and ours["host_seconds"]["settle"] > 0
        assert all(len(one["turns"]) == 2 for one in found.values())
        assert "--turns 2" in rows[row]["machine"]["command"]
        assert "zero1_custom: step" in printed
    elif row.startswith("ranks2"):
        # FSDP2 launches from C++.
        launched = {name for name, one in found.items() if one["launches"]["collectives"] >= 2}
        assert launched | {"fsdp2", "zero3_custom"} == set(found)
    else:
        # A reduction and a gather of each bucket, and what the hosts tell each other.
        assert ours["launches"]["collectives"] > found["ddp"]["launches"]["collectives"]
        assert rows[row]["computing_seconds"] > 0 and "ms of computing" in printed


@pytest.mark.slow
def test_a_row_that_fails_says_why_and_leaves_the_others(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    few = ("--turns", "1", "--contenders", "single_device")
    first = {"of": "an earlier run"}
    output.write_text(json.dumps({"rows": {"world1-tiny-bf16-true": first}}))
    code, printed, rows = run(output, "--rows", "world1-tiny-bf16-mixed", *few, "--limit-seconds", "1")
    assert code != 0 and "failed: world1-tiny-bf16-mixed" in printed
    assert rows["world1-tiny-bf16-mixed"]["failed"].startswith("it was ended after 1 s")
    assert rows["world1-tiny-bf16-true"] == first
    # Once more, and in its place.
    code, printed, rows = run(output, "--rows", "world1-tiny-bf16-mixed", *few)
    assert code == 0, printed
    assert "failed" not in rows["world1-tiny-bf16-mixed"] and len(rows) == 2
    code, printed, later = run(output, *few, "--budget-seconds", "1")
    assert code == 0 and printed.count("not begun") == len(all_rows(["tiny"])) and later == rows


def test_ratios_are_taken_turn_by_turn() -> None:
    turns = {"single_device": [1.0, 2.0, 4.0], "zero1_custom": [2.0, 3.0], "ddp": []}
    row = {"contenders": {name: {"turns": [{"seconds": s} for s in seconds]} for name, seconds in turns.items()}}
    row["contenders"]["zero1_custom"]["peak_allocated"] = 3
    row["contenders"]["single_device"]["peak_allocated"] = 2
    summarize(row)
    ours: dict[str, Any] = row["contenders"]["zero1_custom"]
    assert ours["step_seconds"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert ours["step_ratio"] == {"median": 1.75, "min": 1.5, "max": 2.0} and ours["peak_ratio"] == 1.5
    assert "step_seconds" not in row["contenders"]["ddp"]
    lines = "\n".join(lines_of("world1-tiny-bf16-mixed", row))
    assert "step 1.750 of a single device's, goal 1.05: MISSED" in lines


def test_it_needs_a_gpu(tmp_path: Path) -> None:
    ran = run_python([ROOT / "benchmarks/gpu/run.py", "--output", tmp_path / "found.json"], tmp_path)
    assert ran.returncode != 0 and "No CUDA device is here" in ran.stderr and not any(tmp_path.iterdir())
