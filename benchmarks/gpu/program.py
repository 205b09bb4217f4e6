"""What a training costs on a GPU: step time, launches, host time and peak memory of each strategy, in turns.

Every row has processes of its own and a limit of time, and goes into the result file when it ends, in the place of an
earlier one of its key. A row that fails says why. The most valuable rows come first.

- world1: one rank with a device of its own, beside Lightning's single-device training;
- ranks2: two ranks that share the device, over NCCL where it lets them;
- fake8, fake64, fake512: one process plays one rank of as many, whose collectives send nothing: whether its host keeps
  up with what the device computes.

Step time and memory are those of the model's batch. Host time and launches are counted with a batch of next to nothing,
so that the device never keeps its host waiting.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import SIZES
from benchmarks.gpu.processes import Failure, environments_of, python, read_json_if_there, run_processes
from benchmarks.gpu.results import lines_of, merge, summarize
from benchmarks.gpu.rows import Row, all_rows, chosen

_LIMIT = 280.0
_LIMIT_OF_TRIAL = 60.0
_SHORTEST = 20.0
"""Seconds in which no row would get far: it would only take the place of an earlier one."""
_SHARE_FOR_TURNS = 0.8
"""Of a row's time, after which no turn begins that may not end in time."""


def measure_row(row: Row, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What is found of a row, in at most so many seconds: all of it, what there was when it failed, or why not."""
    began = time.monotonic()
    result: dict[str, Any] = {"row": row._asdict(), "device": arguments.device}
    environments = environments_of(row.processes)
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{rank}.json" for rank in range(row.processes)]
        try:
            if row.processes > 1:
                _try_to_communicate(row, arguments, min(seconds, _LIMIT_OF_TRIAL))
        except Failure as failure:
            return result | {"skipped": f"{row.processes} ranks on one device: {failure.reason}", "log": failure.lines}
        left = seconds - (time.monotonic() - began)
        commands = [[*_worker(row, arguments, left), "--answer", str(answer)] for answer in answers]
        try:
            run_processes(commands, environments, left)
        except Failure as failure:
            result |= {"failed": failure.reason, "log": failure.lines}
        # Ranks hold alike, and step together.
        known = read_json_if_there(answers[0])
        result |= {} if known is None else json.loads(known)
    if "failed" in result and "at" in result:
        result["failed"] = f"{result['failed']} (at {result['at']})"
    summarize(result)
    return result


def _try_to_communicate(row: Row, arguments: argparse.Namespace, seconds: float) -> None:
    command = _worker(row, arguments, seconds)
    run_processes([command] * row.processes, environments_of(row.processes), seconds)


def _worker(row: Row, arguments: argparse.Namespace, seconds: float) -> list[str]:
    numbers = {"--warm-up": arguments.warm_up, "--steps": arguments.steps, "--turns": arguments.turns}
    numbers["--seconds"] = _SHARE_FOR_TURNS * seconds
    options = [text for name, number in numbers.items() for text in (name, str(number))]
    contenders = ["--contenders", *arguments.contenders] if arguments.contenders else []
    return python("benchmarks.gpu.worker", json.dumps(row), "--device", arguments.device, *options, *contenders)


def failures(key: str, result: Mapping[str, Any]) -> list[str]:
    """What has failed in a row: all of it, or some of the strategies."""
    contenders = result.get("contenders", {}).items()
    return [key] * ("failed" in result) + [f"{key} {name}" for name, one in contenders if "failed" in one]


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=[], help="how the keys begin of those that run; by default all")
    parser.add_argument("--list", action="store_true", help="only show the keys of the rows")
    parser.add_argument("--contenders", nargs="+", default=[], help="strategies that take part; by default all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", nargs="+", choices=SIZES, help="by default 124m and 1.3b; on a CPU tiny")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="after which no row begins")
    parser.add_argument("--limit-seconds", type=float, default=_LIMIT, help="of one row")
    parser.add_argument("--warm-up", type=int, default=6, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=8, help="steps on the clock")
    parser.add_argument("--turns", type=int, default=3, help="how often the strategies take turns")
    parser.add_argument("--output", type=Path, help="the file that rows are merged into")
    arguments = parser.parse_args(given)
    models = arguments.model or (["tiny"] if arguments.device == "cpu" else ["124m", "1.3b"])
    if arguments.warm_up < 1 or arguments.steps < 1 or arguments.turns < 1:
        parser.error("--warm-up, --steps and --turns are 1 or more")
    try:
        arguments.rows = chosen(all_rows(models), arguments.rows)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def check_device(device: str) -> None:
    """Ends the program where there is nothing to measure on."""
    # Not imported before: what only lists rows needs no torch.
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "No CUDA device is here, and this measures one. `--device cpu --model tiny` goes through the same code on a"
            " CPU, to see whether it runs."
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print(*(row.key for row in arguments.rows), sep="\n")
        return
    check_device(arguments.device)
    os.environ["PYTHONUNBUFFERED"] = "1"
    ends = time.monotonic() + arguments.budget_seconds
    failed = []
    for row in arguments.rows:
        left = ends - time.monotonic()
        if left < _SHORTEST:
            print(f"{row.key}\n  not begun: what is left of --budget-seconds is too little", flush=True)
            continue
        result = measure_row(row, arguments, min(arguments.limit_seconds, left))
        failed += failures(row.key, result)
        if arguments.output is not None:
            merge(arguments.output, row.key, result)
        print("\n".join(lines_of(row.key, result)), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
