"""Exposed communication: what a step takes longer with communication than without.

    python -m benchmarks.overlap --devices 2 --output overlap.json
    sudo python -m benchmarks.two_nodes --rate 1gbit -- \\
        python -m benchmarks.overlap --num-nodes 2 --devices 1 --label "two nodes, 1 Gbit/s" --output overlap.json

The step without communication is that of `single_process`, in turns with the others in one run; all is seconds, pair by
pair. A picture lies beside the result file afterwards. What remains exposed is not a share of anything: a slower wire,
a dearer message and a step that computes more all change it in their own way.
"""

import argparse

from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, measure_in_turns
from benchmarks.peers import SINGLE_PROCESS, WITHIN_STEP
from benchmarks.ranks import become_ranks, global_rank
from benchmarks.step_time import summarize


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


if __name__ == "__main__":
    main()
