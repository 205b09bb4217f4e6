"""``lightning-parstrat tune``: runs a program for a few steps under each strategy, and writes down the fastest."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_parstrat.cli.text import UsageError, positive, table
from lightning_parstrat.core.footprint import PRECISIONS, Footprint, Training, ddp, pipeline, zero1, zero3
from lightning_parstrat.core.grid import Grid
from lightning_parstrat.core.tuning import MEASURES

_DESCRIPTION = """
Runs a LightningCLI's program for some steps under each strategy that keeps its results, without checkpoints, loggers
and validation. Shows predicted and measured times of a step, and writes the fastest to a configuration.

  lightning-parstrat tune -- python main.py fit --config c.yaml
  python main.py fit --config c.yaml --config chosen.yaml

The first run shows how fast ranks compute and send. Other strategies run in the order of their predicted times. If a
prediction is slower than the best measured time, the strategy is left out. On a cluster, the program after `--` must
start all ranks, as `srun python main.py fit ...` does within an allocation.
"""
_SLACK = 0.85
"""A strategy may compute so much faster than ``zero1_custom``, whose run a prediction is made from."""

_SEEN = 0.02
"""With a smaller share of waiting, a step does not show how fast the link is."""

_FASTEST = 1e15


class Candidate(NamedTuple):
    """A strategy to run.

    Attributes:
        name: Its flag, with what is set.
        strategy: Its class.
        arguments: Its arguments.
        footprint: What it sends.
        windows: How many batches it accumulates instead of one, so that a step keeps its samples.
    """

    name: str
    strategy: str
    arguments: tuple[tuple[str, Any], ...]
    footprint: Footprint
    windows: int = 1


class _Speeds(NamedTuple):
    """Seconds of computing in a rank's step, bytes a second of a link, and micro-batches of a step."""

    compute: float
    rate: float
    accumulate: int

    def predicted(self, one: Candidate) -> float:
        """Seconds of a step."""
        return one.footprint.step_seconds(one.windows * self.compute, self.rate, self.accumulate)


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("--steps", type=positive, default=30, help="steps of each run (at least 25)")
    parser.add_argument("--output", type=Path, default=Path("chosen.yaml"), help="the configuration that is written")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is given up")
    return parser


def run(arguments: Namespace) -> int:
    """Runs the candidates, and writes the fastest. The exit code is 1 if none could be run.

    Raises:
        UsageError: The program is not that of a LightningCLI.
    """
    program = arguments.program
    if "fit" not in program:
        raise UsageError("write the program of a LightningCLI after `--`, such as `-- python main.py fit -c c.yaml`.")
    if arguments.steps < 25:
        raise UsageError(f"--steps {arguments.steps}: times of fewer than 25 steps are not reliable.")
    first = _measure(Candidate("zero1_custom", "ZeRO1Strategy", (), zero1(Training(parameters=1))), arguments, 1)
    if isinstance(first, str):
        print(f"zero1_custom could not be run: {first}\nThe program must be a LightningCLI's, and train by it.")
        return 1
    own, *others = candidates(first)
    speeds = _speeds(own, first)
    rows, times = [_row(own, speeds, first)], {own: first["seconds"]}
    for one in sorted(others, key=speeds.predicted):
        if _SLACK * speeds.predicted(one) > min(times.values()):
            rows.append(_row(one, speeds, "left out: its prediction is slower than the best"))
            continue
        found = _measure(one, arguments, first["accumulate_grad_batches"])
        rows.append(_row(one, speeds, found))
        if not isinstance(found, str):
            times[one] = found["seconds"]
    best = min(times, key=lambda one: times[one])
    again = _measure(best, arguments, first["accumulate_grad_batches"])
    rows.append(_row(best, speeds, again))
    if not isinstance(again, str):
        times[best] = (times[best] + again["seconds"]) / 2
        best = min(times, key=lambda one: times[one])
    print(table([["strategy", "predicted", "measured", ""], *rows]))
    _write(arguments.output, best, times[best], first)
    print(f"\nFastest: {best.name}. Use it by: {' '.join(program)} --config {arguments.output}")
    return 0


def candidates(first: dict[str, Any]) -> list[Candidate]:
    """Strategies that keep a training's results, those of ``ddp``. The first is ``zero1_custom``.

    Args:
        first: What a training has written.
    """
    nodes, devices, ranks = first["nodes"], first["devices"], first["nodes"] * first["devices"]
    training = Training(
        parameters=first["parameters"],
        nodes=nodes,
        devices=devices,
        micro_batches=first["accumulate_grad_batches"],
        precision=first["precision"] if first["precision"] in PRECISIONS else "32-true",
    )
    of_zero1, of_zero3 = zero1(training), zero3(training)
    found = [
        Candidate("zero1_custom", "ZeRO1Strategy", (), of_zero1),
        Candidate("ddp_tuned", "TunedDDPStrategy", (), ddp(training, tuned=True)),
        Candidate("zero3_custom", "ZeRO3Strategy", (), of_zero3),
    ]
    if training.precision == "bf16-mixed":
        both = (("comm_dtype", "bf16"), ("gather_dtype", "bf16"))
        half = of_zero1._replace(on_link=of_zero1.on_link / 2)
        found.append(Candidate("zero1_custom, bf16 both ways", "ZeRO1Strategy", both, half))
    if nodes > 1 and devices > 1:
        grouped = (("shard_group", "node"),)
        in_nodes = replace(training, shard_ranks=devices)
        found.append(Candidate("zero1_custom, node", "ZeRO1Strategy", grouped, zero1(in_nodes)))
        found.append(Candidate("zero3_custom, node", "ZeRO3Strategy", grouped, zero3(in_nodes)))
    if ranks > 1:
        staged = pipeline(replace(training, micro_batches=1), Grid(ranks=ranks, pipeline=ranks))
        # The ranks of a pipeline share a batch. The times are those of as many batches as ranks.
        found.append(Candidate("pipeline_custom", "PipelineStrategy", (), staged, ranks))
    return found


def _speeds(own: Candidate, first: dict[str, Any]) -> "_Speeds":
    """How fast ranks compute and send, as far as a run of ``zero1_custom`` shows it."""
    waiting, accumulate = first["waiting"] or 0.0, first["accumulate_grad_batches"]
    compute = first["seconds"] * (1 - waiting)
    if waiting < _SEEN:
        return _Speeds(compute, _FASTEST, accumulate)
    slow, fast = 1.0, _FASTEST
    # By bisection: the larger the rate, the shorter the predicted step.
    for _ in range(100):
        rate = (slow * fast) ** 0.5
        is_slow = _Speeds(compute, rate, accumulate).predicted(own) > first["seconds"]
        slow, fast = (rate, fast) if is_slow else (slow, rate)
    return _Speeds(compute, fast, accumulate)


def _row(one: Candidate, speeds: "_Speeds", found: dict[str, Any] | str) -> list[str]:
    measured = ("", found) if isinstance(found, str) else (f"{found['seconds']:.3f} s", "")
    return [one.name, f"{speeds.predicted(one):.3f} s", *measured]


def _measure(one: Candidate, arguments: Namespace, accumulate: int) -> dict[str, Any] | str:
    """What a run of the program has written, or why there is nothing."""
    folder = Path(tempfile.mkdtemp(prefix="parstrat-tune-"))
    trainer = {
        **_section(one, accumulate),
        "max_steps": arguments.steps,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    try:
        (folder / "candidate.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
        command = [*arguments.program, "--config", str(folder / "candidate.yaml")]
        code, said = _run(command, folder / "times.json", arguments.timeout)
        if (folder / "times.json").is_file():
            found: dict[str, Any] = json.loads((folder / "times.json").read_text())
            return found
        return f"exit code {code}: {said}" if code else "it has written no times"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _section(one: Candidate, accumulate: int) -> dict[str, Any]:
    strategy = {"class_path": f"lightning_parstrat.{one.strategy}", "init_args": dict(one.arguments)}
    return {"strategy": strategy, **({"accumulate_grad_batches": accumulate * one.windows} if one.windows > 1 else {})}


def _run(command: Sequence[str], target: Path, timeout: float) -> tuple[int, str]:
    """The exit code of a command, and the last line that it has printed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MEASURES: str(target)},
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return 1, f"it took longer than {timeout:g} s (--timeout)"
        finally:
            # Ranks that the program has started.
            if process.poll() != 0:
                _end(process.pid)
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
        return process.returncode, lines[-1][-200:] if lines else ""


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _write(path: Path, one: Candidate, seconds: float, first: dict[str, Any]) -> None:
    """Writes a configuration of the Trainer. Its first line has what it was measured for."""
    kept = {key: first[key] for key in ("parameters", "precision", "nodes", "devices", "machine")}
    # If only the strategy is taken from the file, a training may accumulate otherwise.
    kept["accumulate_grad_batches"] = one.windows * first["accumulate_grad_batches"]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    measured = json.dumps({"measured": now, "seconds": round(seconds, 4), **kept})
    text = yaml.safe_dump({"trainer": _section(one, first["accumulate_grad_batches"])}, sort_keys=False)
    path.write_text(f"# {measured}\n{text}")
    print(f"wrote {path}", file=sys.stderr)
