"""Step time of strategies through Lightning's Trainer, interleaved in one run (A B A B).

On local processes:   python -m benchmarks.step_time --devices 2
On two nodes:         sudo python -m benchmarks.two_nodes --rate 1gbit (see there), or on real ones with --num-nodes 2
                      and RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set as torchrun does

A step's time is the wall time of a run of micro-batches divided by their number, so that whatever communication runs on
into the next step is inside the clock. Medians with minimum and maximum, and ratios to the first strategy pair by pair.
With --bandwidth, ratios to what no strategy could be faster than, from `single_process` in the same run.
"""

import argparse
import statistics
from typing import Any

from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, make_decoder, measure_in_turns, quartiles, spread
from benchmarks.peers import PEERS, SINGLE_PROCESS
from benchmarks.ranks import become_ranks, global_rank


def summarize(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Per strategy: spread, the ratio to the first one pair by pair, and the seconds that communication adds."""
    first = next(iter(measured))
    base = [run["seconds"] for run in measured[first]]
    alone = [run["seconds"] for run in measured.get(SINGLE_PROCESS, ())]
    summary: dict[str, Any] = {}
    for name, runs in measured.items():
        seconds = [run["seconds"] for run in runs]
        ratios = [time / beside for time, beside in zip(seconds, base, strict=True)]
        summary[name] = {
            "seconds": seconds,
            **spread(seconds),
            f"ratio_to_{first}": statistics.median(ratios),
            f"ratio_to_{first}_quartiles": quartiles(ratios),
        }
        if alone and name != SINGLE_PROCESS:
            exposed = [time - without for time, without in zip(seconds, alone, strict=True)]
            summary[name] |= {"exposed": statistics.median(exposed), "exposed_quartiles": quartiles(exposed)}
        sent = [run["sent"] for run in runs if run["sent"] is not None]
        if sent:
            summary[name]["node_bytes_sent_per_optimizer_step"] = round(statistics.median(sent))
        if runs[-1]["payload"] is not None:
            summary[name]["rank_payload_per_optimizer_step"] = runs[-1]["payload"]
        if name == SINGLE_PROCESS:
            phases = [run["phases"] for run in runs]
            summary[name]["phases"] = {key: statistics.median(phase[key] for phase in phases) for key in phases[0]}
    return summary


def limits(phases: dict[str, float], arguments: argparse.Namespace, parameter_bytes: int) -> dict[str, float]:
    """Seconds per micro-batch if communication hid behind computation wherever it can, and cost the core nothing.

    Half of the bytes are gradients, which travel while the last backward of a step runs. ZeRO-1 has stepped parameters
    travel in the next forward, but none before the whole gradient's norm is known; DDP sends both halves in backward.
    """
    parts = arguments.num_nodes if arguments.num_nodes > 1 else arguments.devices
    half = (parts - 1) / parts * parameter_bytes * 8 / arguments.bandwidth
    forward, backward, step = phases["forward"], phases["backward"], phases["step"]
    ranks = arguments.num_nodes * arguments.devices
    local = (arguments.accumulate - 1) * (forward + backward)
    zero1 = local + max(backward, half) + max(forward, half) + step / ranks
    ddp = local + forward + max(backward, 2 * half) + step
    return {
        "seconds_on_the_wire_per_half": half,
        "zero1_with_norm_clipping": zero1 / arguments.accumulate,
        "ddp": ddp / arguments.accumulate,
    }


def add_limits(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Adds the limits, and each strategy's ratio to ZeRO-1's, where there is something to compute them from."""
    times = result["step_time"]
    if arguments.bandwidth is None or SINGLE_PROCESS not in times:
        return
    parameter_bytes = sum(parameter.nbytes for parameter in make_decoder(arguments).parameters())
    bounds = limits(times[SINGLE_PROCESS]["phases"], arguments, parameter_bytes)
    result["limits"] = {"bits_per_second": arguments.bandwidth, "parameter_bytes": parameter_bytes, **bounds}
    for name, summary in times.items():
        if name != SINGLE_PROCESS:
            summary["ratio_to_limit"] = summary["median"] / bounds["zero1_with_norm_clipping"]


def show(result: dict[str, Any]) -> None:
    """Prints a line per strategy."""
    first = next(iter(result["step_time"]))
    for name, times in result["step_time"].items():
        line = f"{name:42s} {times['median']:.3f} s  ({times['min']:.3f} to {times['max']:.3f})"
        line += f"  {times[f'ratio_to_{first}']:.3f} of {first}"
        if "ratio_to_limit" in times:
            line += f"  {times['ratio_to_limit']:.3f} of the limit"
        if "node_bytes_sent_per_optimizer_step" in times:
            line += f"  {times['node_bytes_sent_per_optimizer_step'] / 1e6:.1f} MB sent"
        print(line)
    for name, reason in result["not_run"].items():
        print(f"{name:42s} not run: {reason}")
    if "limits" in result:
        print(f"{'limit of ZeRO-1 with norm clipping':42s} {result['limits']['zero1_with_norm_clipping']:.3f} s")
        print(f"{'limit of DDP':42s} {result['limits']['ddp']:.3f} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies", nargs="+", default=list(PEERS), help=f"{', '.join(PEERS)}, or any name that Lightning knows"
    )
    add_arguments(parser)
    parser.add_argument("--bandwidth", type=float, metavar="BITS_PER_SECOND", help="of a node's link, for the limits")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    measured, not_run = measure_in_turns(arguments.strategies, arguments)
    if global_rank() != 0:
        return
    result = {"label": arguments.label, "step_time": summarize(measured), "not_run": not_run}
    add_limits(result, arguments)
    show(result)
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
