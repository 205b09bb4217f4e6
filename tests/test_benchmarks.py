"""The benchmarks, run as their reader would run them, but tiny."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_python

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


@pytest.mark.slow
def test_step_time_of_every_strategy_on_an_emulated_accelerator(tmp_path: Path) -> None:
    emulation = ["--emulate", "0.004", "--accumulate", "2", "--bandwidth", "1e9"]
    result = run_benchmark("step_time", [*TINY, *emulation], tmp_path)
    times = result["step_time"]
    peers = {"ddp", "ddp+zero_redundancy", "fsdp2", "deepspeed_stage_1", "single_process"}
    assert set(times) | set(result["not_run"]) == peers | {"ddp_tuned", "zero1_custom", "zero2_custom"}
    assert set(result["not_run"]) <= {"deepspeed_stage_1"}
    # The emulated forward and backward cannot take less than they sleep.
    assert all(time["min"] > 3 * 0.004 and time["ratio_to_ddp"] > 0 for time in times.values())
    for name in ("zero1_custom", "zero2_custom"):
        assert times[name]["rank_payload_per_optimizer_step"]["reduce_scatter_bytes"] > 0
    half = result["limits"]["parameter_bytes"] * 8 / 2 / 1e9
    assert result["limits"]["seconds_on_the_wire_per_half"] == pytest.approx(half)
    assert times["zero1_custom"]["ratio_to_limit"] > 0


def test_the_hook_of_import_torch_imports_nothing_heavy(tmp_path: Path) -> None:
    result = run_benchmark("import_hook", ["--processes", "3"], tmp_path)
    assert len(result["seconds"]) == 3 and all(name.startswith("lightning_parstrat") for name in result["imported"])


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    result = run_benchmark("memory", [*TINY, "--width", "64", "--strategies", "ddp", "zero1_custom"], tmp_path)
    for memory in result["memory"].values():
        assert len(memory["ranks"]) == 2
        # A rank holds at least its parameters and, of two, half of Adam's state: 4 and 4 bytes per parameter.
        assert memory["peak_growth"] >= memory["held_growth"] > 8 * result["parameters"]
    assert result["memory"]["zero1_custom"]["held_growth"] < result["memory"]["ddp"]["held_growth"]


@pytest.mark.slow
def test_full_sharding_beside_what_is_written_by_hand(tmp_path: Path) -> None:
    # Wide enough for layers to be found.
    result = run_benchmark("full_sharding", [*TINY, "--width", "128", "--depth", "2"], tmp_path)
    by_hand, zero3 = (result["memory"][name] for name in ("fsdp2_by_hand", "zero3_custom"))
    assert result["step_time"]["zero3_custom"]["ratio_to_fsdp2_by_hand"] > 0
    for one in (by_hand, zero3):
        assert one["units"] == 2 and one["peak"] > one["held"]
        assert one["held_bytes_per_parameter"] == pytest.approx(16 / 2, rel=0.05)
    assert 0.97 < zero3["held_ratio_to_fsdp2_by_hand"] < 1.03


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    costs = run_benchmark("checkpoints", [*TINY, "--steps", "6", "--every", "2"], tmp_path)["checkpoints"]
    assert set(costs) == {"ddp", "zero1_custom(full)", "zero1_custom(sharded)", "zero1_custom(async)"}
    assert all(cost["stall"]["min"] > 0 and cost["ratio_to_synchronous"]["median"] > 0 for cost in costs.values())


@pytest.mark.slow
def test_bucketing(tmp_path: Path) -> None:
    options = ["--cases", "delay per collective", "--scale", "0.1", "--pairs", "1", "--steps", "2"]
    for case in run_benchmark("bucketing", options, tmp_path)["cases"].values():
        assert set(case["seconds"]) == {"default", "1 MB", "4 MB", "16 MB", "64 MB", "tuned"}
        assert (case["bucket_cap_mb"] is not None) == (case["verdict"] == "tuned"), case["reason"]
        assert case["tuning_steps"] >= 12 and len(case["tried_seconds"]) > 2


@pytest.mark.slow
def test_overlap_and_overhead(tmp_path: Path) -> None:
    steps = run_benchmark("overlap", TINY, tmp_path)["overlap"]
    alone = steps.pop("single_process")["median"]
    assert set(steps) == {"ddp", "zero1_custom", "zero1_custom(overlap_param_gather=False)"}
    assert all(step["exposed"] == pytest.approx(step["median"] - alone) for step in steps.values())
    tiny = ["--tensors", "4", "--parameters", "100", "--steps", "2", "--runs", "1"]
    result = run_benchmark("overhead", ["--strategies", "ddp", "zero1_custom", *tiny], tmp_path)
    assert {"step_time", "processor_time", "failed_runs"} <= set(result)


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


def test_two_nodes_says_what_is_missing(tmp_path: Path) -> None:
    ran = run_python([*TWO_NODES, "--", "true"], ROOT, {"PATH": str(tmp_path)})
    assert ran.returncode == 2
    assert ran.stderr.startswith("two_nodes: ")
