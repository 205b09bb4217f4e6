"""Exposed communication: what a step takes longer with communication than without.

    python benchmarks/overlap.py --devices 2 --output overlap.json
    sudo python benchmarks/two_nodes.py --rate 1gbit -- \\
        python benchmarks/overlap.py --num-nodes 2 --devices 1 --label "two nodes, 1 Gbit/s" --output overlap.json

The step without communication is that of `single_process`, in turns with the others in one run; all is seconds, pair by
pair. A picture lies beside the result file afterwards. What remains exposed is not a share of anything: a slower wire,
a dearer message and a step that computes more all change it in their own way.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from machine import write_result
from measuring import add_arguments, check_arguments, measure_in_turns, quartiles, spread
from peers import SINGLE_PROCESS, WITHIN_STEP
from ranks import become_ranks, global_rank


def summarize(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds per micro-batch, and those that communication adds, with their quartiles."""
    alone = [run["seconds"] for run in measured[SINGLE_PROCESS]]
    summary: dict[str, Any] = {SINGLE_PROCESS: {"seconds": alone, **spread(alone)}}
    for name, runs in measured.items():
        if name == SINGLE_PROCESS:
            continue
        seconds = [run["seconds"] for run in runs]
        exposed = [time - without for time, without in zip(seconds, alone, strict=True)]
        summary[name] = {
            "seconds": seconds,
            **spread(seconds),
            "exposed": statistics.median(exposed),
            "exposed_quartiles": quartiles(exposed),
        }
    return summary


def plot(result: dict[str, Any], target: Path) -> None:
    """Draws a bar per strategy: the step without communication, and on it what is exposed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = result["overlap"]
    alone = steps[SINGLE_PROCESS]["median"]
    names = [name for name in steps if name != SINGLE_PROCESS]
    exposed = [steps[name]["exposed"] for name in names]
    errors = [
        [max(0.0, e - steps[name]["exposed_quartiles"][0]) for name, e in zip(names, exposed, strict=True)],
        [max(0.0, steps[name]["exposed_quartiles"][1] - e) for name, e in zip(names, exposed, strict=True)],
    ]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.6 * len(names)))
    axes.barh(names, [alone] * len(names), color="0.8", label=f"step without communication: {alone:.3f} s")
    axes.barh(names, exposed, left=alone, xerr=errors, color="tab:blue", capsize=3, label="exposed communication")
    for name, seconds in zip(names, exposed, strict=True):
        axes.text(alone / 2, name, f"{seconds:+.3f} s exposed", ha="center", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="seconds per micro-batch", title=result["label"])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=130, bbox_inches="tight")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1_custom", WITHIN_STEP])
    add_arguments(parser)
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    names = [name for name in arguments.strategies if name != SINGLE_PROCESS]
    measured, not_run = measure_in_turns([*names, SINGLE_PROCESS], arguments)
    if global_rank() != 0:
        return
    result = {"label": arguments.label, "overlap": summarize(measured), "not_run": not_run}
    for name, step in result["overlap"].items():
        print(
            f"{name:42s} {step['median']:.3f} s" + (f", {step['exposed']:+.3f} s exposed" if "exposed" in step else "")
        )
    write_result(result, arguments.output)
    if arguments.output is not None:
        plot(result, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
