"""Runs the tests of this folder, and the tables of trainings, where there may be nothing but torch and a GPU.

    python -m tests.gpu.run [--wheels gpu-wheels] [--device cuda] [--seconds 570] [--output result.json] [-k WORDS]

A group is a file: a process of its own, with a time limit. What trains are ranks in processes of their own: one that
hangs or crashes costs its test alone. All that ran is in a table, and in a file with the machine, the versions and the
command. Nothing but the standard library is imported here: what the machine lacks is installed from the folder of
wheels, into a folder that goes when the run has ended.
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
    Group("gpu/test_steady_step.py", 90),
    Group("gpu/test_memory.py", 60),
    Group("strategies/test_realistic_trainings.py", 120),
    Group("gpu/test_two_ranks.py", 70),
    Group("gpu/test_features.py", 60),
    Group("gpu/test_across_devices.py", 100),
    Group("strategies/test_callbacks.py", 90),
)
"""The most valuable first: what the time does not suffice for is left out at the end."""


class Result(NamedTuple):
    name: str
    outcome: str
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
        # Reasons are not cut.
        "COLUMNS": "500",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_group(group: Group, options: argparse.Namespace, ends: float, variables: dict[str, str]) -> list[Result]:
    """Runs a file's tests until ``ends``, by the monotonic clock."""
    left = min(ends - time.monotonic(), group.seconds * options.patience)
    if left <= 0:
        return [Result(group.file, NOT_RUN, "no time was left")]
    # Without what the project's settings leave out.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--override-ini=addopts="]
    command += ["--device", options.device, f"tests/{group.file}", *(["-k", options.words] if options.words else [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(left)
        finally:
            # Ranks are of its session.
            _kill(process)
        log.seek(0)
        return results_of(group.file, log.read(), code)


_LINE = re.compile(r"^(tests/\S+?::.+?) (?:(PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?.*)?$", re.MULTILINE)
_OUTCOMES = {"PASSED": PASSED, "FAILED": FAILED, "ERROR": FAILED, "SKIPPED": SKIPPED}


def results_of(file: str, said: str, code: int | None) -> list[Result]:
    """From a line of pytest's for each test; ``code`` is None if the process was ended, in the test without outcome."""
    began = said.partition("test session starts")[2].partition("short test summary")[0]
    found = {}
    for name, outcome, reason in _LINE.findall(began):
        if outcome:
            shown = reason if outcome in ("PASSED", "SKIPPED") else _errors(said, name.rpartition("::")[2])
            found[name] = Result(name, _OUTCOMES[outcome], shown)
        else:
            ended = Result(name, TIMED_OUT) if code is None else Result(name, FAILED, f"it ended with code {code}")
            found.setdefault(name, ended)
    collected = re.search(r"collected (\d+) items?(?: / (\d+) deselected)?", said)
    if collected is None:
        return [Result(file, FAILED if code is not None else TIMED_OUT, said[-6000:])]
    more = int(collected[1]) - int(collected[2] or 0) - len(found)
    if more <= 0:
        return [*found.values()]
    rest = Result(f"{file}: {more} more", NOT_RUN, "no time was left")
    return [*found.values(), rest if code is None else rest._replace(outcome=FAILED, reason=said[-3000:])]


def _errors(said: str, test: str) -> str:
    """The end of what pytest says of a failed test: the last lines of a rank's traceback tell the error."""
    section = re.split(r"\n_{5,} ", said.partition(f" {test} _")[2])[0]
    lines = [line for line in section.splitlines() if line.startswith("E ")]
    return "\n".join(lines[-30:]) or section[:3000] or "its file was cut short: use -k"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def line(result: Result) -> str:
    reason = f" ({' '.join(result.reason.split())[:300]})" if result.outcome in (SKIPPED, NOT_RUN) else ""
    return f"{result.name.removeprefix('tests/'):<100} {result.outcome}{reason}"


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
        ends, results = began + options.seconds, []
        for group in GROUPS:
            if options.groups is None or any(part in group.file for part in options.groups):
                for result in run_group(group, options, ends, variables):
                    results.append(result)
                    print(line(result), flush=True)
    outcomes = [result.outcome for result in results]
    counts = {one: n for one in (PASSED, FAILED, SKIPPED, TIMED_OUT, NOT_RUN) if (n := outcomes.count(one))}
    for result in results:
        if result.outcome in (FAILED, TIMED_OUT):
            print(f"\n--- {result.name}: {result.outcome}\n{result.reason[-3000:]}")
    print(f"\n{', '.join(f'{n} {one}' for one, n in counts.items())} in {time.monotonic() - began:.0f} s")
    if output is not None:
        where["command"] = shlex.join(["python", "-m", "tests.gpu.run", *sys.argv[1:]])
        result = {"machine": where, "counts": counts, "results": [one._asdict() for one in results]}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {output}")
    return 1 if {FAILED, TIMED_OUT, NOT_RUN} & counts.keys() or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
