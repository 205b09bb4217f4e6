"""Measures one row, as one of its processes, and writes down what it has found after every training."""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu.clocks import HostTime, Launches, Operators, StepTime
from benchmarks.gpu.contenders import Task, clean_up, computing_seconds, fit, silence
from benchmarks.gpu.fake_world import fake_world
from benchmarks.gpu.model import SIZES
from benchmarks.gpu.rows import Row
from benchmarks.machine import describe_machine

_COUNTED_STEPS = 2


class Plan(NamedTuple):
    """How a row is measured.

    Attributes:
        warm_up: Steps before the clock starts.
        steps: Steps on the clock.
        turns: How often the strategies take turns.
        deadline: After which no turn begins that may not end; by ``time.monotonic``.
    """

    warm_up: int
    steps: int
    turns: int
    deadline: float

    @property
    def all_steps(self) -> int:
        """With the one by whose beginning the last one has ended."""
        return self.warm_up + self.steps + 1


class Report:
    """What is known of a row so far, in a file: a process that is killed does not take it along.

    Args:
        path: The file.
        plan: How the row is measured.
        contenders: The strategies.
    """

    def __init__(self, path: Path, plan: Plan, contenders: tuple[str, ...]) -> None:
        self._path = path
        self.found: dict[str, Any] = {"machine": describe_machine()}
        self.found |= {"warm_up": plan.warm_up, "steps": plan.steps}
        self.contenders: dict[str, dict[str, Any]] = {name: {"turns": []} for name in contenders}
        self.found["contenders"] = self.contenders

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Within it, that is what is being done."""
        self.found["at"] = doing
        self.save()
        yield
        del self.found["at"]
        self.save()

    def save(self) -> None:
        """Writes all or nothing."""
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self.found))
        os.replace(whole, self._path)


class Measurement:
    """Has the strategies of a row take turns.

    Args:
        task: What is trained.
        plan: How it is measured.
        report: Gets what is found.
    """

    def __init__(self, task: Task, plan: Plan, report: Report) -> None:
        self._task, self._plan, self._report = task, plan, report
        self._longest = 0.0

    def run(self) -> None:
        """All of it: first a turn of each, as that tells most."""
        names = list(self._report.contenders)
        if self._task.row.setting == "fake":
            with self._report.at("computing alone"):
                seconds = computing_seconds(self._task, self._plan.steps)
                self._report.found["computing_seconds"] = seconds
        for turn in range(self._plan.turns):
            for name in names:
                self._measure(name, f"turn {turn + 1}", self._step_time)
            if turn == 0:
                for name in names:
                    self._measure(name, "host time", self._host_time)
                for name in names:
                    self._measure(name, "launches", self._launches)

    @property
    def _alone(self) -> bool:
        return self._task.row.processes == 1

    def _measure(self, name: str, what: str, measure: Callable[[str], None]) -> None:
        """One training; of a row of one process, a strategy that fails is left out from then on."""
        mine = self._report.contenders[name]
        # Several processes would have to agree on it.
        if "failed" in mine or (self._alone and time.monotonic() + self._longest > self._plan.deadline):
            return
        began = time.monotonic()
        with self._report.at(f"{name}, {what}"):
            try:
                measure(name)
            except Exception as error:
                if not self._alone:
                    raise
                mine["failed"] = f"{what}: {type(error).__name__}: {str(error).strip()[:500]}"
                # Its frames hold what the training held.
                traceback.clear_frames(error.__traceback__)
        if "failed" in mine:
            clean_up(self._task.device)
        self._longest = max(self._longest, time.monotonic() - began)

    def _fit(self, name: str, steps: int, callback: Any, short: bool = False) -> None:
        fake = self._task.row.setting == "fake"
        with fake_world(self._task.row.ranks) if fake else nullcontext():
            fit(name, self._task, steps, [callback], short)

    def _step_time(self, name: str) -> None:
        watch = StepTime(self._plan.warm_up, self._plan.steps, self._task.device)
        self._fit(name, self._plan.all_steps, watch)
        self._report.contenders[name]["turns"].append(watch.found)

    def _host_time(self, name: str) -> None:
        watch = HostTime(self._plan.warm_up, self._plan.steps)
        self._fit(name, self._plan.all_steps, watch, short=True)
        self._report.contenders[name]["host_seconds"] = watch.found

    def _launches(self, name: str) -> None:
        counts = self._plan.warm_up, _COUNTED_STEPS
        watch = Launches(*counts, self._task.device) if self._alone else Operators(*counts)
        # A step is as many launches whatever its size.
        self._fit(name, self._plan.warm_up + _COUNTED_STEPS + 1, watch, short=True)
        self._report.contenders[name]["launches"] = watch.found


def try_collectives(device: torch.device) -> None:
    """Whether these processes can exchange anything at all: NCCL refuses two on one GPU, unless it takes them for two.

    Collective.
    """
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    size = dist.get_world_size()
    whole, part = torch.ones(1024 * size, device=device), torch.ones(1024, device=device)
    dist.all_reduce(part)
    dist.all_gather_into_tensor(whole, part)
    dist.reduce_scatter_tensor(part, whole)
    assert part[0].item() == size * size
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", type=json.loads, help="the fields of a Row")
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which no turn begins")
    parser.add_argument(
        "--answer", type=Path, help="where to write what is found; without it, only tries to communicate"
    )
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    arguments = parse_arguments()
    # All ranks have the one that there is.
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if arguments.answer is None:
        try_collectives(device)
        return
    silence()
    row = Row(*arguments.row)
    plan = Plan(arguments.warm_up, arguments.steps, arguments.turns, began + arguments.seconds)
    contenders = tuple(name for name in row.contenders if name in arguments.contenders or not arguments.contenders)
    report = Report(arguments.answer, plan, contenders)
    report.found["size"] = SIZES[row.model]._asdict()
    Measurement(Task(row, device), plan, report).run()
    report.save()


if __name__ == "__main__":
    main()
