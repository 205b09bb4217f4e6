"""Runs the tests of this folder, and the tables of trainings, where there may be nothing but torch and a GPU.

    python -m tests.gpu.run [--wheels gpu-wheels] [--device cuda] [--seconds 570] [--output result.json] [-k WORDS]

A group is a file: a process of its own, with a time limit. A test that hangs or ends its process costs itself alone:
those after it run in another process, as long as time is left. All that ran is in a table, and in a file with the
machine, the versions and the command. Nothing but the standard library is imported here: what the machine lacks is
installed from the folder of wheels, into a folder that goes when the run has ended.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
PASSED, FAILED, SKIPPED, TIMED_OUT, NOT_RUN = "passed", "failed", "skipped", "timed out", "not run"


class Group(NamedTuple):
    """A file in ``tests``, and the seconds it may take."""

    file: str
    seconds: float


GROUPS = (
    Group("strategies/test_parity.py", 280),
    Group("gpu/test_poisoned.py", 60),
    Group("gpu/test_steady_step.py", 60),
    Group("gpu/test_memory.py", 60),
    Group("strategies/test_realistic_trainings.py", 120),
    Group("gpu/test_two_ranks.py", 100),
    Group("gpu/test_features.py", 60),
    Group("gpu/test_across_devices.py", 100),
    Group("strategies/test_callbacks.py", 90),
)
"""The most valuable first: what the time does not suffice for is left out at the end."""


class Result(NamedTuple):
    """Of one test."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Those that this interpreter lacks, or has older; the package's own always.

    What is compiled is never put before what the machine has: others there may be built for that.
    """
    return [wheel for wheel in wheels if _is_missing(wheel)]


def _is_missing(wheel: Path) -> bool:
    name, offered = wheel.name.split("-")[:2]
    try:
        present = version(name)
    except PackageNotFoundError:
        return True
    is_pure = wheel.name.endswith("-none-any.whl")
    return name == "lightning_parstrat" or (is_pure and _numbers(present) < _numbers(offered))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def install(folder: Path, target: Path) -> None:
    """Puts what is missing into ``target``, without network."""
    wheels = missing(sorted(folder.glob("*.whl")))
    print(f"installed from {folder}: {', '.join('-'.join(wheel.name.split('-')[:2]) for wheel in wheels)}", flush=True)
    options = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "--target", target]
    if wheels:
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)


def environment(target: Path) -> dict[str, str]:
    """For the processes of tests: what was installed, and no plugin of pytest's that happens to be there."""
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Run:
    """All groups, one after the other.

    Args:
        options: What the command line said.
        folder: For reports and logs.
        variables: The environment of the tests' processes.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, variables: dict[str, str]) -> None:
        self._options = options
        self._folder = folder
        self._variables = variables
        self._ends = time.monotonic() + options.seconds
        self.results: list[Result] = []

    def group(self, group: Group) -> list[Result]:
        """Runs a file's tests, in as many processes as it takes."""
        ends = min(self._ends, time.monotonic() + group.seconds * self._options.patience)
        chosen: list[str] | None = None
        found: list[Result] = []
        while chosen is None or chosen:
            if time.monotonic() >= ends:
                found += [Result(name, NOT_RUN, 0.0, "no time was left") for name in chosen or [group.file]]
                break
            report = self._process(group, chosen, ends)
            found += report.results
            if not report.collected:
                found.append(Result(group.file, FAILED, 0.0, report.log))
                break
            known = {result.name for result in report.results}
            chosen = [name for name in report.collected if name not in known]
        self.results += found
        return found

    def _process(self, group: Group, chosen: list[str] | None, ends: float) -> "_Report":
        report, log = self._folder / "report.jsonl", self._folder / "log"
        report.write_text("")
        names = [f"tests/{group.file}"] if chosen is None else chosen
        # Without what the project's settings leave out.
        plugins = ["-p", "tests.gpu.reporting", "-p", "no:cacheprovider", "--override-ini=addopts="]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, "--device", self._options.device, *names]
        if self._options.words:
            command += ["-k", self._options.words]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._variables, "PARSTRAT_REPORT": str(report)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(1.0, ends - time.monotonic()))
                ended = f"the process ended with code {code}"
            except subprocess.TimeoutExpired:
                ended = ""
            finally:
                # Ranks are of its session.
                _kill(process)
        return _Report.read(report, ended, log.read_text(errors="replace")[-3000:])


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Report(NamedTuple):
    """What a process has told of its tests."""

    collected: list[str]
    results: list[Result]
    log: str

    @classmethod
    def read(cls, path: Path, ended: str, log: str) -> "_Report":
        collected: list[str] = []
        began: dict[str, float] = {}
        results: dict[str, Result] = {}
        for line in path.read_text().splitlines():
            told = json.loads(line)
            if "collected" in told:
                collected = told["collected"]
            elif "began" in told:
                began[told["began"]] = told["at"]
            else:
                results[told["name"]] = Result(**told)
        for name, at in began.items():
            if name not in results:
                outcome = FAILED if ended else TIMED_OUT
                results[name] = Result(name, outcome, round(time.time() - at, 1), f"{ended}\n{log}".strip())
        nothing_ran = not began and not collected
        return cls(collected, list(results.values()), f"{ended}\n{log}" if nothing_ran or not collected else log)


def line(result: Result) -> str:
    """Of the table."""
    said = result.outcome
    if result.outcome in (SKIPPED, NOT_RUN):
        said += f" ({' '.join(result.reason.split())[:300]})"
    return f"{result.name.removeprefix('tests/'):<100} {result.seconds:6.1f}  {said}"


def machine(variables: dict[str, str]) -> dict[str, Any]:
    """Where this runs, told by a process that has the packages."""
    describe = "import json; from benchmarks.machine import describe_machine; print(json.dumps(describe_machine()))"
    command = [sys.executable, "-c", describe]
    told = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    if told.returncode:
        return {"error": told.stderr[-2000:]}
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the tests themselves")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, of which what is missing is installed")
    parser.add_argument("--seconds", type=float, default=570.0, help="that the run may take (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=1.0, help="by what the time limits of groups are multiplied")
    parser.add_argument("--output", type=Path, help=f"the result file (default: {OUTPUT.relative_to(ROOT)} on a GPU)")
    parser.add_argument("--groups", nargs="*", help="parts of the names of files; all by default")
    parser.add_argument("-k", dest="words", help="passed on to pytest")
    return parser.parse_args(arguments)


def main() -> int:
    options, began = parse(), time.monotonic()
    # Whoever ends this run ends the tests' processes, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    output = options.output or (OUTPUT if options.device == "cuda" else None)
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        target = Path(folder) / "packages"
        if options.wheels is not None:
            install(options.wheels.resolve(), target)
        variables = environment(target)
        where = machine(variables)
        print(json.dumps(where, indent=1), flush=True)
        run = Run(options, Path(folder), variables)
        for group in GROUPS:
            if options.groups is None or any(part in group.file for part in options.groups):
                for result in run.group(group):
                    print(line(result), flush=True)
    counts = {one: n for one in (PASSED, FAILED, SKIPPED, TIMED_OUT, NOT_RUN) if (n := _count(run.results, one))}
    for result in run.results:
        if result.outcome in (FAILED, TIMED_OUT):
            print(f"\n--- {result.name}: {result.outcome}\n{result.reason[-3000:]}")
    print(f"\n{', '.join(f'{n} {one}' for one, n in counts.items())} in {time.monotonic() - began:.0f} s")
    if output is not None:
        where["command"] = shlex.join(["python", "-m", "tests.gpu.run", *sys.argv[1:]])
        result = {"machine": where, "counts": counts, "results": [one._asdict() for one in run.results]}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {output}")
    return 1 if {FAILED, TIMED_OUT, NOT_RUN} & counts.keys() or not counts else 0


def _count(results: Sequence[Result], outcome: str) -> int:
    return sum(result.outcome == outcome for result in results)


if __name__ == "__main__":
    sys.exit(main())
