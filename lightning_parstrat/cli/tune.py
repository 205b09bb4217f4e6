"""``lightning-parstrat tune``: runs a program for a few steps under each strategy, and writes down the fastest."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from lightning_parstrat.cli.text import UsageError, positive, table
from lightning_parstrat.core.footprint import PRECISIONS, Footprint, Training, ddp, grids, pipeline, zero1, zero3
from lightning_parstrat.core.tuning import MEASURES
from lightning_parstrat.core.wording import amount

_DESCRIPTION = """
Runs a LightningCLI's program for some steps under each strategy that keeps its results. Validation takes one batch, and
logs go to a temporary folder. Shows predicted and measured times of a step, and writes the fastest to a
configuration.

  lightning-parstrat tune -- python main.py fit --config c.yaml
  python main.py fit --config c.yaml --config chosen.yaml

The first run shows how fast ranks load, compute and send, and their memory. It is one under zero1_custom, or else under
zero3_custom. Other strategies run in the order of their predicted times. If a prediction is slower than the best
measured time, or does not fit, the strategy is left out. The fastest, and others within 6 % of it, run twice. On a
cluster, the program after `--` must start all ranks, as `srun python main.py fit ...` does within an allocation.
"""
_SLACK = 0.85
"""A strategy may compute so much faster than ``zero1_custom``, whose run a prediction is made from."""

_SEEN = 0.02
"""With a smaller share of waiting, a step does not show how fast the link is."""

_CLOSE = 1.06
"""Strategies that took at most so many times as long as the fastest run again, as other programs disturb a run."""

_FASTEST = 1e15

_NO_TIMES = "it has written no times"

_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
"""How Python begins the text of an exception, after what torchrun or torch puts before it."""

_UNKNOWN = Training(parameters=1)

_HEADER = ["strategy", "predicted", "measured", "times one device", "loading", "waiting", ""]


class Candidate(NamedTuple):
    """A strategy to run.

    Attributes:
        strategy: Its class.
        footprint: What it holds and sends.
        arguments: Its arguments.
    """

    strategy: str
    footprint: Footprint
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def windows(self) -> int:
        """How many batches it accumulates instead of one, so that a step keeps its samples."""
        return self.footprint.stages * self.footprint.sharing

    @property
    def name(self) -> str:
        """Its flag, and what is set."""
        return ", ".join([self.footprint.strategy.split()[0], *(f"{key}={value}" for key, value in self.arguments)])


class _Costs(NamedTuple):
    """The costs that predictions are made of, as the first run shows them.

    Attributes:
        compute: Seconds of computing in a rank's step.
        loading: Seconds in which it waits for the loader.
        rate: Bytes a second of a link.
        accumulate: Micro-batches of a step.
        rest: Bytes of memory that its footprint does not explain, such as activations.
        memory: Bytes of memory that a rank can have.
        ranks: The number of all ranks.
    """

    compute: float
    loading: float
    rate: float
    accumulate: int
    rest: float
    memory: float
    ranks: int

    def predicted(self, one: Candidate) -> float:
        """Seconds of a step."""
        batches = one.windows * self.accumulate
        sends = one.footprint.step_seconds(one.windows * self.compute, self.rate, batches)
        return one.windows * self.loading + sends

    def needs(self, one: Candidate) -> float:
        """Bytes of a rank's memory."""
        return one.footprint.peak + self.rest

    def speed_up(self, seconds: float) -> float:
        """How many times as fast as one device a step is that takes so long."""
        return self.ranks * (self.compute + self.loading) / seconds


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("--steps", type=positive, default=30, help="steps of each run (at least 25)")
    parser.add_argument("--output", type=Path, default=Path("chosen.yaml"), help="the configuration that is written")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds after which a run is given up")
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
    if not arguments.output.resolve().parent.is_dir():
        raise UsageError(f"--output {arguments.output}: there is no such folder. Make it first.")
    if arguments.output.is_dir():
        raise UsageError(f"--output {arguments.output} is a folder. Write the path of a file.")
    rows: list[list[str]] = []
    first = _first_run(arguments, rows)
    if first is None:
        print(table([_HEADER, *rows]))
        print(
            "The program must be a LightningCLI's, and train by it with zero1_custom or zero3_custom. Its runs must end"
            " within --timeout."
        )
        return 1
    known = candidates(first)
    own = next(one for one in known if one.name == first["name"])
    costs, times = _costs(own, first), {own: first["seconds"]}
    rows.append(_row(own, costs, first))
    ran = {row[0] for row in rows}
    for one in sorted((one for one in known if one.name not in ran), key=costs.predicted):
        # Without the share of waiting, as on GPUs, a prediction does not know what communication costs.
        if first["waiting"] is not None and _SLACK * costs.predicted(one) > min(times.values()):
            found: dict[str, Any] | str = "left out: its prediction is slower than the best"
        elif costs.needs(one) > costs.memory:
            found = f"left out: it needs about {amount(costs.needs(one))} of {amount(costs.memory)}"
        else:
            found = _measure(_section(one, first["accumulate_grad_batches"]), arguments)
        rows.append(_row(one, costs, found))
        if not isinstance(found, str):
            times[one] = found["seconds"]
    for one in [one for one in times if times[one] <= _CLOSE * min(times.values())]:
        again = _measure(_section(one, first["accumulate_grad_batches"]), arguments)
        rows.append(_row(one, costs, again))
        if not isinstance(again, str):
            times[one] = (times[one] + again["seconds"]) / 2
    best = min(times, key=lambda one: times[one])
    print(table([_HEADER, *rows]))
    _write(arguments.output, best, times[best], first)
    print(f"\nFastest: {best.name}. Use it by: {' '.join(program)} --config {arguments.output}")
    return 0


def _first_run(arguments: Namespace, rows: list[list[str]]) -> dict[str, Any] | None:
    """The result of the first strategy that runs, or None. A failed run becomes a row."""
    for one in (Candidate("ZeRO1Strategy", zero1(_UNKNOWN)), Candidate("ZeRO3Strategy", zero3(_UNKNOWN))):
        found = _measure(_section(one, 1), arguments)
        if not isinstance(found, str):
            return {**found, "name": one.name}
        rows.append([one.name, "", "", "", "", "", found])
        if found == _NO_TIMES:
            # It has ended well, but has not read the configuration.
            return None
    return None


def candidates(first: dict[str, Any]) -> list[Candidate]:
    """Strategies that keep a training's results, those of ``ddp``.

    Args:
        first: What a training has written.
    """
    devices, ranks = first["devices"], first["nodes"] * first["devices"]
    training = Training(
        parameters=first["parameters"],
        values=first["values"],
        nodes=first["nodes"],
        devices=devices,
        micro_batches=first["accumulate_grad_batches"],
        precision=first["precision"] if first["precision"] in PRECISIONS else "32-true",
        cut=first["cut"],
    )
    of_zero1 = zero1(training)
    found = [
        Candidate("ZeRO1Strategy", of_zero1),
        Candidate("TunedDDPStrategy", ddp(training, tuned=True)),
        Candidate("ZeRO3Strategy", zero3(training)),
    ]
    if training.precision == "bf16-mixed":
        both = (("comm_dtype", "bf16"), ("gather_dtype", "bf16"))
        found.append(Candidate("ZeRO1Strategy", of_zero1._replace(on_link=of_zero1.on_link / 2), both))
    if first["nodes"] > 1 and devices > 1:
        grouped, in_nodes = (("shard_group", "node"),), replace(training, shard_ranks=devices)
        found.append(Candidate("ZeRO1Strategy", zero1(in_nodes), grouped))
        found.append(Candidate("ZeRO3Strategy", zero3(in_nodes), grouped))
    # Ranks that share layers, and the ranks of a pipeline, share a batch. A step has as many batches as before.
    for size in (2, 4, 8):
        if training.cut and devices % size == 0:
            shared = zero3(replace(training, tensor_ranks=size, micro_batches=size * training.micro_batches))
            found.append(Candidate("ZeRO3Strategy", shared, (("tensor_parallel_size", size),)))
    for grid in grids(ranks, 1):
        staged = pipeline(replace(training, micro_batches=1), grid)
        found.append(Candidate("PipelineStrategy", staged, (("data_parallel_size", grid.data),)))
    return found


def _costs(own: Candidate, first: dict[str, Any]) -> _Costs:
    """How fast ranks compute, load and send."""
    seconds, waiting, loading = first["seconds"], first["waiting"] or 0.0, first["loading"]
    slow, fast = 1.0, _FASTEST
    costs = _Costs(
        compute=seconds * max(0.0, 1 - waiting - loading),
        loading=seconds * loading,
        rate=fast,
        accumulate=first["accumulate_grad_batches"],
        rest=max(0.0, first["peak"] - own.footprint.peak),
        memory=first["memory"],
        ranks=first["nodes"] * first["devices"],
    )
    if waiting < _SEEN:
        return costs
    # By bisection: the larger the rate, the shorter the predicted step.
    for _ in range(100):
        rate = (slow * fast) ** 0.5
        is_slow = costs._replace(rate=rate).predicted(own) > seconds
        slow, fast = (rate, fast) if is_slow else (slow, rate)
    return costs._replace(rate=fast)


def _row(one: Candidate, costs: _Costs, found: dict[str, Any] | str) -> list[str]:
    row = [one.name, f"{costs.predicted(one):.3f} s"]
    if isinstance(found, str):
        return [*row, "", "", "", "", found]
    seconds, waiting = found["seconds"], found["waiting"]
    shares = [f"{found['loading']:.0%}", "" if waiting is None else f"{waiting:.0%}"]
    return [*row, f"{seconds:.3f} s", f"{costs.speed_up(seconds):.2g}", *shares, ""]


def _measure(section: dict[str, Any], arguments: Namespace) -> dict[str, Any] | str:
    """The result that a run of the program has written, or the reason why there is none."""
    # Ranks of other nodes see the file's folder, but not this node's temporary files.
    beside = arguments.output.resolve().parent
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=beside, ignore_cleanup_errors=True) as folder:
        config, times = Path(folder, "candidate.yaml"), Path(folder, "times.json")
        trainer = {
            **section,
            "max_steps": arguments.steps,
            "max_epochs": -1,
            # A scheduler may need a metric of validation.
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            # A callback may need one, as LearningRateMonitor does. It writes into the folder.
            "logger": True,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        config.write_text(yaml.safe_dump({"trainer": trainer}))
        failed = _run([*arguments.program, "--config", str(config)], times, arguments.timeout)
        # A run that was ended may have written a part.
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(times.read_text())
            return found
        return failed or _NO_TIMES


def _section(one: Candidate, accumulate: int) -> dict[str, Any]:
    strategy = {"class_path": f"lightning_parstrat.{one.strategy}", "init_args": dict(one.arguments)}
    return {"strategy": strategy, **({"accumulate_grad_batches": accumulate * one.windows} if one.windows > 1 else {})}


def _run(command: Sequence[str], target: Path, timeout: float) -> str:
    """Runs a command. Returns its last error or its last line if it has failed, otherwise nothing."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MEASURES: str(target)},
            start_new_session=True,
        )
        try:
            with _exit_by_signals():
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"it took longer than {timeout:g} s (--timeout)"
        finally:
            # Ranks that the program has started.
            if process.poll() != 0:
                _end(process.pid)
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
        said = ([line for line in lines if _ERROR.match(line)] or lines or [""])[-1]
        return f"exit code {process.returncode}: {said[:200]}" if process.returncode else ""


@contextmanager
def _exit_by_signals() -> Iterator[None]:
    """Within it, signals to end raise an exception, so that the program's ranks are ended, too."""

    def end(number: int, _: Any) -> NoReturn:
        sys.exit(128 + number)

    # Not those that `nohup` ignores.
    handled = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    before = {one: signal.signal(one, end) for one in handled}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


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
