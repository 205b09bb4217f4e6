"""Writes the tables of numbers in README.md and on the pages, from the result files of the benchmarks.

    python docs/make_tables.py [--check]

A table stands below a comment that names it, such as `<!-- table: memory -->`. Tables of formulas are computed by the
code that `lightning-parstrat plan` and `make scale` run. With `--check` nothing is written, and a table that differs
from its source is an error.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from benchmarks.scale import estimate, run  # noqa: E402
from lightning_parstrat.cli.main import main as parstrat  # noqa: E402

TABLE = re.compile(r"(<!-- table: (.+) -->\n\n)((?:\|.*\n)+)")

Row = Sequence[str]
Json = Mapping[str, Any]


def result(name: str) -> Any:
    """What a result file holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def link(name: str, text: str) -> str:
    """A link to a result file, from a page in docs."""
    return f"[{text}](../benchmarks/results/{name}.json)"


def interval(found: Json, median: str = "median", bounds: str = "", digits: int = 3, unit: str = "") -> str:
    """A median with its minimum and maximum, or with the interval that stands under that name."""
    low, high = found[bounds] if bounds else (found["min"], found["max"])
    return f"{found[median]:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def small(number: float) -> str:
    """A difference that may be none."""
    return "0" if number == 0 else f"{number:.2f}" if number > 0.01 else f"{number:.1e}"


def step_times() -> Iterator[Row]:
    """Steps of ``ddp`` and of ``zero1_custom`` on several links."""
    rows = {
        "two_nodes_200mbit": "2 on two nodes, a core each, 200 Mbit/s",
        "two_nodes_1gbit": "the same, 1 Gbit/s",
        "two_nodes_10gbit": "the same, 10 Gbit/s",
        "accumulate_1gbit": "1 Gbit/s, 4 micro-batches a step (time of one)",
        "emulated_1gbit": "1 Gbit/s, layers that sleep instead of computing, as if on an accelerator",
        "four_ranks_emulated_1gbit": "the same, 4 ranks: two to a node",
        "local": "2 on one machine with two cores, no network",
    }
    yield "Ranks", "`ddp`", "`zero1_custom`", "Ratio", "To the limit", "Result"
    for name, label in rows.items():
        times = result(f"step_time_{name}")["step_time"]
        ours = times["zero1_custom"]
        ratio = interval(ours, "ratio_to_ddp", "ratio_to_ddp_quartiles")
        limit = f"{ours['ratio_to_limit']:.2f}" if "ratio_to_limit" in ours else ""
        both = [interval(times[strategy], unit=" s") for strategy in ("ddp", "zero1_custom")]
        yield label, *both, ratio, limit, link(f"step_time_{name}", name)


def peers() -> Iterator[Row]:
    """Steps of other programs that shard."""
    times = result("step_time_peers_1gbit")["step_time"]
    yield "", "Step", "Of `zero1_custom`'s"
    for name in ("ddp", "ddp+zero_redundancy", "fsdp2", "zero1_custom"):
        ratio = times[name]["median"] / times["zero1_custom"]["median"]
        yield f"`{name}`", interval(times[name], unit=" s"), f"{ratio:.2f}"


def memory() -> Iterator[Row]:
    """How much a rank grows."""
    yield "", "At its peak, with activations", "By the formula, without", "Between steps", "By the formula"
    formulas = {"ddp": ("20", "20"), "zero1_custom": ("8 + 12/2 = 14", "4 + 12/2 = 10")}
    for name, (peak, held) in formulas.items():
        found = result("memory")["memory"][name]
        cells = [
            f"{found[f'{what}_growth'] / 1e6:.0f} MB, {found[f'{what}_growth_bytes_per_parameter']:.1f}"
            for what in ("peak", "held")
        ]
        yield f"`{name}`", f"{cells[0]} bytes per parameter", peak, cells[1], held


def bucketing() -> Iterator[Row]:
    """DDP's buckets: torch's default, and the best of one size."""
    rows = [
        ("bucketing_1gbit", "gpt", "GPT, 10.5 million parameters in 50 tensors, 1 Gbit/s"),
        ("bucketing_1gbit", "uniform layers", "24 layers alike, 1 Gbit/s"),
        ("bucketing_1gbit", "late large tensor", "a large tensor that is ready last, 1 Gbit/s"),
        ("bucketing", "many small tensors", "60 small tensors, 2 ms a message"),
        ("bucketing", "delay per collective", "16 layers alike, 10 ms a message"),
        ("bucketing", "bandwidth-bound", "a network too slow for any buckets"),
        ("bucketing", "hidden anyway", "everything hidden anyway"),
    ]
    yield "", "Default", "Best of one size"
    for name, case, label in rows:
        found = result(name)["cases"][case]
        best, default = (found["seconds"][key]["median"] for key in (found["best_scalar"], "default"))
        yield label, f"{default:.3f} s", f"{best:.3f} s ({found['best_scalar']})"


def order() -> Iterator[Row]:
    """Layers that run in another order than they are registered in."""
    yield "", "As they run", "First layer last", "Shuffled", "Reversed"
    for name in ("ddp", "zero1_custom"):
        orders = result("registration_order_1gbit")["step_time"][name]
        ratios = [f"{orders[order]['ratio']:.3f}" for order in ("first layer last", "shuffled", "reversed")]
        yield f"`{name}`", f"{orders['as they run']['median']:.3f} s", *ratios


def overhead() -> Iterator[Row]:
    """Almost nothing to compute or to send."""
    rows = {
        "overhead": "300 tensors, 1 million parameters, clipped by norm",
        "overhead_small": "8 tensors, 100,000 parameters",
        "overhead_small_clipped": "the same, clipped by norm",
    }
    yield "Model", "Step, relative to `ddp`", "Step of each", "Main thread's work, relative to `ddp`", "Result"
    for name, label in rows.items():
        found = result(name)
        ours, ddp = (found["step_time"][strategy] for strategy in ("zero1_custom", "ddp"))
        ratio = interval(ours, "ratio", "interval_95_percent", digits=2)
        each = f"{1e3 * ours['median']:.1f} ms, {1e3 * ddp['median']:.1f} ms"
        yield label, ratio, each, f"{found['processor_time']['zero1_custom']['ratio']:.2f}", link(name, name)


def one_gpu() -> Iterator[Row]:
    """A GPU that trains alone, and one that plays a rank of 64."""
    yield "", "Step alone", "Ratio", "Peak memory", "Step as a rank of 64", "Ratio to `ddp`", "Peak memory"
    rows = result("gpu")["rows"]
    alone, played = (rows[f"{key}-124m-bf16-mixed"]["contenders"] for key in ("world1", "fake64"))
    for name in ("single_device", "ddp", "ddp_tuned", "zero1_custom", "zero3_custom", "fsdp2"):
        cells = [f"{1e3 * alone[name]['step_seconds']['median']:.1f} ms", f"{alone[name]['step_ratio']['median']:.2f}"]
        cells.append(f"{alone[name]['peak_allocated'] / 1e9:.1f} GB")
        if name in played:
            times = {key: 1e3 * value for key, value in played[name]["step_seconds"].items()}
            ratio = times["median"] / (1e3 * played["ddp"]["step_seconds"]["median"])
            cells += [interval(times, digits=1, unit=" ms"), f"{ratio:.2f}"]
            cells.append(f"{played[name]['peak_allocated'] / 1e9:.1f} GB")
        yield f"`{name}`", *cells, *["-"] * (6 - len(cells))


def full_sharding() -> Iterator[Row]:
    """``zero3_custom`` beside FSDP2 by hand."""
    found = result("full_sharding")
    held, peak = "Held between steps", "Most within a step, with activations"
    yield "", "Step, median (min to max)", "Ratio", held, peak
    for name, label in {"fsdp2_by_hand": "FSDP2 by hand", "zero3_custom": "`zero3_custom`"}.items():
        times, bytes_ = found["step_time"][name], found["memory"][name]
        ratio, per = f"{times['ratio_to_fsdp2_by_hand']:.3f}", "bytes_per_parameter"
        held, peak = (f"{bytes_[f'{what}_{per}']:.2f} bytes per parameter" for what in ("held", "peak"))
        yield label, interval(times, unit=" s"), ratio, held, peak


def checkpoints() -> Iterator[Row]:
    """How long a save holds up training."""
    labels = {
        "ddp": "`ddp`",
        "zero1_custom(full)": "`zero1_custom`, full",
        "zero1_custom(sharded)": "`zero1_custom`, sharded",
        "zero1_custom(async)": "`zero1_custom`, sharded, `async_save=True`",
    }
    yield "", "Wait", "Relative to sharded", "Whole cost of a save", "Host memory"
    for name, label in labels.items():
        found = result("checkpoints")["checkpoints"][name]
        wait, ratio, whole, host = (
            found[key]["median"] for key in ("stall", "ratio_to_synchronous", "whole_cost", "host_peak_bytes")
        )
        yield label, f"{wait:.2f} s", f"{ratio:.2f}", f"{whole:.2f} s", f"{host / 1e6:.0f} MB"


def convergence(name: str, header: str, digits: int, labels: Mapping[str, str]) -> Iterator[Row]:
    """Bits per byte after equally many steps."""
    yield header, "Bits per byte"
    for run_name, label in labels.items():
        yield label, f"{result(name)['results'][run_name]['val_bits_per_byte']:.{digits}f}"


WIRE = {
    "fp32 on the wire": "fp32",
    'reduce_dtype="bf16"': '`comm_dtype="bf16"`',
    'gather_dtype="bf16"': '`gather_dtype="bf16"`',
    "both": "both",
}
BF16 = {
    "bf16-mixed, ddp": '"bf16-mixed" under `ddp`',
    "bf16-true, zero1_custom": '"bf16-true" under `zero1_custom`',
    "bf16-true, ddp": '"bf16-true" under `ddp`',
}


def unfrozen() -> Iterator[Row]:
    """How far ranks are apart after layers were unfrozen."""
    yield "Strategy", "Between the ranks", "To one process on the joint batch"
    for name in ("ddp", "ddp_find_unused_parameters_true", "ddp_tuned", "zero1_custom"):
        found = result("unfrozen")["unfrozen"]["own hook"][name]
        yield f"`{name}`", *(small(found[key]) for key in ("between_ranks", "to_single_process"))


def unequal() -> Iterator[Row]:
    """Steps of ranks of unequal speed."""
    yield "", "Equal shares", '`rank_shares="auto"`', "Ratio", "To one process"
    for name, found in result("unequal")["unequal"].items():
        times = (interval(found[shares], unit=" s") for shares in ("equal", "auto"))
        ours = found["auto"]
        yield f"`{name}`", *times, f"{ours['ratio_to_equal']:.2f}", small(ours["to_single_process"])


def slow_networks() -> Iterator[Row]:
    """Steps on slow links, each beside one process that sends nothing."""
    both, alone = "zero1_custom(comm_dtype='bf16',gather_dtype='bf16')", "single_process"
    groups = "zero1_custom(shard_group='node',outer_every=50)"
    rows = [
        ("two_nodes_200mbit", "200 Mbit/s", "zero1_custom", alone),
        ("bf16_200mbit", "200 Mbit/s", both, alone),
        ("pipeline_200mbit", "200 Mbit/s", "pipeline_custom", f"{alone}(whole batch)"),
        ("outer_200mbit", "200 Mbit/s", groups, alone),
        ("two_nodes_1gbit", "1 Gbit/s", "zero1_custom", alone),
        ("late_1gbit", "1 Gbit/s", both, alone),
        ("outer_1gbit", "1 Gbit/s", groups, alone),
    ]
    labels = {both: "bf16 both ways", groups: '`shard_group="node"`, `outer_every=50`'}
    yield "", "Link", "Step", "One process", "Ratio", "Result"
    for name, rate, strategy, computes in rows:
        file = name if name.startswith("pipeline") else f"step_time_{name}"
        times = result(file)["step_time"]
        ratio = times[strategy]["median"] / times[computes]["median"]
        both_times = [interval(times[one], unit=" s") for one in (strategy, computes)]
        yield labels.get(strategy, f"`{strategy}`"), rate, *both_times, f"{ratio:.2f}", link(file, name)


def outer() -> Iterator[Row]:
    """What groups that train alone learn, with a usual learning rate and a small one."""
    usual, small = (result(name)["results"] for name in ("convergence_outer", "convergence_outer_1e-4"))
    yield "", "Learning rate 1e-3", "To each step together", "Learning rate 1e-4", "To each step together"
    for name in usual:
        cells = [f"`{name}`" if "=" in name else name]
        for found in (usual, small):
            first = next(iter(found.values()))["val_bits_per_byte"]
            bits = found[name]["val_bits_per_byte"] if name in found else None
            cells += ["", ""] if bits is None else [f"{bits:.3f}", f"{bits - first:+.3f}"]
        yield cells


def records() -> Iterator[Row]:
    """What torch's planner would gather in a sharded save, and what its index costs."""
    yield "Saved by", "Ranks", "Pieces", "Gathered", "Seconds to read that", "Index", "Seconds to make it, to read it"
    for one in result("checkpoint_records")["counted"]:
        gathered, index = (f"{one[f'{what}_bytes'] / 1e6:.1f} MB" for what in ("gathered", "index"))
        read, made, opened = (
            f"{one[f'seconds_to_{what}']:.1f}" for what in ("read_records", "make_index", "read_index")
        )
        label = f"{one['model']}, `{one['strategy']}`"
        yield label, f"{one['ranks']:,}", f"{one['records']:,}", gathered, read, index, f"{made}, {opened}"


def plan(precision: str, sizes: Sequence[str], uses: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The peak by formula, in GB, of each strategy and model on 8 and on 64 ranks."""
    columns = {}
    for size in sizes:
        for ranks in (8, 64):
            given = ["--world-size", str(ranks), "--devices-per-node", "8", "--precision", precision]
            with redirect_stdout(StringIO()) as printed:
                parstrat(["plan", "--parameters", size, "--optimizer", "adamw", "--accumulate", "4", *given, "--json"])
            estimates = json.loads(printed.getvalue())["estimates"]
            columns[f"{size}, {ranks}"] = {one["strategy"]: one["peak_bytes"] / 1e9 for one in estimates}
    first, *others = columns
    yield *(("Use", "If") if uses else ("",)), f"{first} ranks", *others
    for name in columns[first]:
        cells = [f"{by_strategy[name]:.1f}".removesuffix(".0") for by_strategy in columns.values()]
        yield f"`{name}`", *((uses[name],) if uses else ()), *cells


USES = {
    "ddp": "",
    "ddp_tuned": "all fits",
    "zero1_custom": "optimizer state does not fit",
    "zero2_custom": "accumulated gradients do not fit",
    "zero3_custom": "parameters do not fit",
}


def markdown(rows: Iterator[Row]) -> Iterator[str]:
    """The lines of a table whose first row is its header."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |".replace("|  |", "| |")
        if number == 0:
            yield "|---" * len(row) + "|"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    name: lambda rows=rows: markdown(rows())
    for name, rows in {
        "step times": step_times,
        "peers": peers,
        "memory": memory,
        "bucketing": bucketing,
        "order of layers": order,
        "overhead": overhead,
        "full sharding": full_sharding,
        "one GPU": one_gpu,
        "checkpoints": checkpoints,
        "fewer bytes": partial(convergence, "convergence_wire", "Sent", 4, WIRE),
        "16 bits": partial(convergence, "convergence_bf16", "", 3, BF16),
        "unfrozen": unfrozen,
        "unequal ranks": unequal,
        "slow networks": slow_networks,
        "groups that train alone": outer,
        "records": records,
        "plan 32-true": partial(plan, "32-true", ("1B", "7B"), USES),
        "plan bf16-mixed": partial(plan, "bf16-mixed", ("1B", "7B", "13B")),
        "plan bf16-true": partial(plan, "bf16-true", ("1B", "7B", "13B")),
    }.items()
} | {"exposed time": estimate.table, "counts": lambda: run.markdown(list(run.rows(result("scale_counts")["played"])))}


def rendered(text: str) -> str:
    """A page with its tables as their sources have them."""
    return TABLE.sub(lambda found: found[1] + "".join(f"{line}\n" for line in TABLES[found[2]]()), text)


def main(arguments: Sequence[str]) -> int:
    """Writes or checks the tables of all pages."""
    different = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        if rendered(text) != text:
            different.append(page.name)
            if "--check" not in arguments:
                page.write_text(rendered(text))
    print(f"tables that differ from their sources: {', '.join(different) or 'none'}")
    return 1 if different and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
