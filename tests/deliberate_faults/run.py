"""Tries deliberate faults: ``python -m tests.deliberate_faults.run [part of a name ...]``, by default all of them.

Each is put into a copy of the project, whose tests then run against the copy: those that are named with the fault must
fail, and must not where there is no fault. ``test_faults.py`` draws some for ``make test-slow``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.deliberate_faults.faults import FAULTS, Fault
from tests.scripts import PACKAGE_UNDER_TEST

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "lightning_parstrat"
COPIED = (PACKAGE, "tests", "examples", "benchmarks", "pyproject.toml")
SECONDS = 300.0
"""For the tests of one fault."""
TOO_LONG = 124


def main(names: Sequence[str]) -> int:
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    if not chosen:
        print(f"no fault is called {' or '.join(names)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="deliberate-faults-") as folder:
        copy = Path(folder)
        copy_project(copy)
        code, said = _run_tests(copy, sorted({f"tests/{fault.test}" for fault in chosen}), True, None)
        if code != 0:
            print(f"{said}\nwithout any fault these tests fail already")
            return 1
        missed = missed_of(chosen, copy)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found")
    for name in missed:
        print(f"not found: {name}")
    return 1 if missed else 0


def missed_of(chosen: Sequence[Fault], copy: Path) -> list[str]:
    """The names of those that their tests do not find, tried one by one in a copy of the project."""
    return [fault.name for fault in chosen if not _is_found(copy, fault)]


def apply(fault: Fault, package: Path) -> str:
    """Puts a fault into a copy of the package and returns what the file was; its old text must stand there once."""
    path = package / fault.file
    before = path.read_text()
    if before.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {before.count(fault.old)} times, must have it once")
    path.write_text(before.replace(fault.old, fault.new))
    return before


def _is_found(copy: Path, fault: Fault) -> bool:
    start = time.monotonic()
    before = apply(fault, copy / PACKAGE)
    try:
        code, said = _run_tests(copy, [f"tests/{fault.test}"], bool(fault.slow))
    finally:
        (copy / PACKAGE / fault.file).write_text(before)
    # 1 is for tests that failed; whatever else goes wrong has another code.
    found = code == 1
    failed = next((line for line in said.splitlines() if line.startswith("FAILED")), "").partition(" - ")[0]
    print(f"{'found ' if found else 'MISSED'} {time.monotonic() - start:4.0f} s  {fault.name}  {failed}", flush=True)
    if code not in (0, 1):
        print(said)
    return found


def _run_tests(copy: Path, tests: Sequence[str], slow: bool, seconds: float | None = SECONDS) -> tuple[int, str]:
    marks = "not cluster" if slow else "not cluster and not slow"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", PACKAGE_UNDER_TEST: str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return TOO_LONG, f"the tests took longer than {seconds} s"
    return done.returncode, done.stdout + done.stderr


def copy_project(copy: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        else:
            shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
