"""What runs the tests of this folder: each test's outcome is known, and a group has a limit."""

import argparse
import time
from pathlib import Path

import pytest

from tests.gpu import run
from tests.gpu.run import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, Group, environment, line, missing, run_group

ODD = """
import pytest

def test_passes(): pass
@pytest.mark.parametrize("what", ["two words"])
def test_fails(what): assert 1 == 2
def test_is_skipped(): pytest.skip("for a reason")
"""
HANGS = """
import time

def test_hangs(): time.sleep(600)
def test_is_too_late(): pass
"""
ENDS = """
import os

def test_ends_its_process(): os._exit(3)
"""


@pytest.mark.slow
def test_each_outcome_is_known_and_a_group_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    options, found = argparse.Namespace(device="cpu", patience=1.0, words=None), {}
    for file, source in {"test_odd.py": ODD, "test_hangs.py": HANGS, "test_ends.py": ENDS}.items():
        (folder / file).write_text(source)
        results = run_group(Group(file, 10.0), options, time.monotonic() + 60, environment(tmp_path))
        found |= {result.name.removeprefix(f"tests/{file}::test_"): result for result in results}
    assert {name: result.outcome for name, result in found.items()} == {
        "passes": PASSED,
        "fails[two words]": FAILED,
        "is_skipped": SKIPPED,
        "hangs": TIMED_OUT,
        "test_hangs.py: 1 more": NOT_RUN,
        "ends_its_process": FAILED,
    }
    assert "code 3" in found["ends_its_process"].reason and "1 == 2" in found["fails[two words]"].reason
    assert line(found["is_skipped"]).endswith("skipped (for a reason)")


def test_what_is_there_and_as_new_is_not_installed() -> None:
    wheels = {
        "pytest-0.1-py3-none-any.whl": False,
        "pytest-999.0-py3-none-any.whl": True,
        "no_such_thing-1.0-py3-none-any.whl": True,
        # What is compiled stays as the machine has it.
        "numpy-999.0-cp312-cp312-manylinux_2_28_x86_64.whl": False,
        "lightning_parstrat-0.0.1-py3-none-any.whl": True,
    }
    assert {wheel.name for wheel in missing([Path(name) for name in wheels])} == {n for n, new in wheels.items() if new}


def test_the_table_names_every_file_of_tests() -> None:
    there = {path.name for path in Path(run.__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert {group.file.removeprefix("gpu/") for group in run.GROUPS if group.file.startswith("gpu/")} == there
