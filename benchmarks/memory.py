"""Peak memory of a rank under each strategy, in processes that run nothing else.

    python -m benchmarks.memory --output benchmarks/results/memory.json

That is how much the resident set (RSS) has grown since before the module was made, in steady state and at its peak, as
Linux counts it. A tiny fit under the same strategy comes first, so that libraries, threads and the process group are
there already. glibc keeps freed memory for later use, and from several threads in several arenas, which shows as memory
held; by default the ranks run with allocator settings that return large blocks to the system when they are freed, so
that RSS follows what is held. `--malloc default` leaves the settings alone: then the peak is what the system must have.
"""

import argparse
import copy
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, fit, make_decoder
from benchmarks.peers import PEERS, SINGLE_PROCESS, reason_to_leave_out
from benchmarks.ranks import global_rank, own_command, run_local_ranks

# Micro-batches that allocate what later ones find there.
SETTLING = 2
# A fixed threshold: glibc would raise its own with every large block that is freed, and serve more and more from heaps.
RETURNING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class Held(Callback):
    """Memory at the start of each step but the first two, which allocate.

    It has no hook in which a strategy would have to show gradients, which costs memory.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.steps = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        if self.steps > SETTLING:
            self.bytes.append(held_now())


def held_now() -> int:
    """Bytes held by this process."""
    return _status("VmRSS")


def held_at_peak() -> int:
    """The most that was held since :func:`forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> bool:
    """Lets the peak begin with what is held now; False where the system does not permit that."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_here(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Memory of this rank under that strategy."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    tiny = copy.copy(arguments)
    tiny.width, tiny.depth, tiny.steps, tiny.warm_up = 32, 1, 2 * arguments.accumulate, 0
    fit(name, tiny, [])
    was_reset = forget_peak()
    before = held_now()
    held = Held()
    fit(name, arguments, [held])
    return {
        "before": before,
        "held_growth": max(held.bytes) - before,
        "peak_growth": held_at_peak() - before,
        "peak_was_reset": was_reset,
    }


def measure_in_fresh_processes(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        worker = ["--worker", name, "--folder", folder]
        environment = RETURNING_MALLOC if arguments.malloc == "returning" else {}
        code = run_local_ranks([*own_command(), *worker], arguments.devices, environment)
        if code != 0:
            sys.exit(code)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def summarize(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result: per strategy the largest over ranks, in all and in bytes per parameter."""
    parameters = sum(parameter.numel() for parameter in make_decoder(arguments).parameters())
    strategies: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for name in arguments.strategies:
        reason = reason_to_leave_out(name)
        if reason is not None:
            not_run[name] = reason
            continue
        ranks = measure_in_fresh_processes(name, arguments)
        largest = {key: max(rank[key] for rank in ranks) for key in ("held_growth", "peak_growth")}
        strategies[name] = {
            **largest,
            **{f"{key}_bytes_per_parameter": value / parameters for key, value in largest.items()},
            "ranks": ranks,
        }
    return {
        "label": arguments.label,
        "ranks": arguments.devices,
        "parameters": parameters,
        "malloc": {"settings": arguments.malloc, **{name: os.environ.get(name) for name in RETURNING_MALLOC}}
        | (RETURNING_MALLOC if arguments.malloc == "returning" else {}),
        "memory": strategies,
        "not_run": not_run,
    }


def show(result: dict[str, Any]) -> None:
    """Prints a line per strategy."""
    for name, memory in result["memory"].items():
        line = f"{name:42s} held {memory['held_growth'] / 1e6:.0f} MB, peak {memory['peak_growth'] / 1e6:.0f} MB"
        print(line + f" ({memory['peak_growth_bytes_per_parameter']:.1f} bytes per parameter)")
    for name, reason in result["not_run"].items():
        print(f"{name:42s} not run: {reason}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies", nargs="+", default=[SINGLE_PROCESS, "ddp", "zero1_custom"], help=f"among {', '.join(PEERS)}"
    )
    parser.add_argument("--malloc", choices=["returning", "default"], default="returning", help="settings of glibc")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    if arguments.num_nodes != 1:
        parser.error("memory is measured on one node, whose ranks this program starts itself")
    if arguments.warm_up + arguments.steps <= SETTLING:
        parser.error(f"memory is read after {SETTLING} micro-batches: make --steps larger")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker is not None:
        target = arguments.folder / f"{global_rank():04d}.json"
        target.write_text(json.dumps(measure_here(arguments.worker, arguments)))
        return
    result = summarize(arguments)
    show(result)
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
