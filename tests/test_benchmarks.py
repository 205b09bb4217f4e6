"""The benchmarks, run as their reader would run them, but tiny."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_python
from tests.undisturbed import undisturbed

ROOT = Path(__file__).resolve().parent.parent
TWO_NODES = ["-m", "benchmarks.two_nodes"]
TINY = ["--width", "32", "--depth", "1", "--pairs", "1", "--steps", "2", "--warm-up", "2"]


def run_benchmark(command: str, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """What ``python -m benchmarks.<command>`` with these arguments has written."""
    output = folder / "results" / "result.json"
    ran = run_python(["-m", *f"benchmarks.{command}".split(), *arguments, "--output", output], ROOT, timeout=600)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["machine"]["command"].startswith(f"python -m benchmarks.{command.split()[0]} ")
    assert {"torch", "lightning", "lightning-parstrat", "processor", "measured"} <= set(result["machine"])
    return result


EMULATED = ["--emulate", "0.004", "--accumulate", "2", "--bandwidth", "1e9"]
BUCKETING = ["--cases", "delay per collective", "--scale", "0.1", "--pairs", "1", "--steps", "2"]
SMALLEST = ["--tensors", "4", "--parameters", "100", "--steps", "2", "--runs", "1"]
# The command, its options, where the result has the rows, and which there are.
TABLES: dict[str, tuple[list[str], str, set[str]]] = {
    "step_time": (
        [*TINY, *EMULATED],
        "step_time",
        {"ddp", "ddp+zero_redundancy", "fsdp2", "single_process", "ddp_tuned", "zero1_custom", "zero2_custom"},
    ),
    "memory": ([*TINY, "--strategies", "ddp", "zero1_custom"], "memory", {"ddp", "zero1_custom"}),
    # Wide enough for layers to be found.
    "full_sharding": ([*TINY, "--width", "128", "--depth", "2"], "step_time", {"fsdp2_by_hand", "zero3_custom"}),
    "checkpoints": (
        [*TINY, "--steps", "6", "--every", "2"],
        "checkpoints",
        {"ddp", "zero1_custom(full)", "zero1_custom(sharded)", "zero1_custom(async)"},
    ),
    "bucketing": (BUCKETING, "cases", {"delay per collective"}),
    "overlap": (
        TINY,
        "overlap",
        {"ddp", "zero1_custom", "zero1_custom(overlap_param_gather=False)", "single_process"},
    ),
    "overhead": (["--strategies", "ddp", "zero1_custom", *SMALLEST], "step_time", {"ddp", "zero1_custom"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_every_row_is_measured(tmp_path: Path, command: str) -> None:
    options, where, rows = TABLES[command]
    measured = run_benchmark(command, options, tmp_path)[where]
    # Another package may be missing.
    assert set(measured) - {"deepspeed_stage_1"} == rows


def test_the_hook_of_import_torch_imports_nothing_heavy(tmp_path: Path) -> None:
    result = run_benchmark("import_hook", ["--processes", "3"], tmp_path)
    assert len(result["seconds"]) == 3 and all(name.startswith("lightning_parstrat") for name in result["imported"])


@pytest.mark.slow
def test_unfrozen_layers_stay_in_step_where_gradients_of_all_ranks_count(tmp_path: Path) -> None:
    result = run_benchmark("unfrozen", [], tmp_path)
    assert set(result["unfrozen"]) == {"own hook", "BackboneFinetuning"}
    for found in result["unfrozen"].values():
        for strategy in ("ddp_tuned", "zero1_custom"):
            assert found[strategy]["between_ranks"] == 0.0
            assert found[strategy]["to_single_process"] < 1e-6
        # If torch should learn to look again, documentation has to be changed.
        assert found["ddp"]["between_ranks"] > 0.01


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_unequal_ranks_end_beside_one_process(tmp_path: Path) -> None:
    result = run_benchmark("unequal", ["--pairs", "1", "--steps", "40"], tmp_path)
    assert set(result["unequal"]) == {"ddp_tuned", "zero1_custom", "zero3_custom"}
    for found in result["unequal"].values():
        measured = found["auto"]
        assert measured["same_samples_in_each_step"] and measured["to_single_process"] < 1e-6
        assert measured["ratio_to_equal"] < 0.8 and 11 <= measured["samples_of_rank_0_at_the_end"][0] <= 13


def test_two_nodes_says_what_is_missing(tmp_path: Path) -> None:
    ran = run_python([*TWO_NODES, "--", "true"], ROOT, {"PATH": str(tmp_path)})
    assert ran.returncode == 2
    assert ran.stderr.startswith("two_nodes: ")
