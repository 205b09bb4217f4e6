"""What runs the tests of this folder: a test that hangs, or ends its process, costs itself alone."""

import argparse
import time
from pathlib import Path

import pytest

from tests.gpu import run
from tests.gpu.run import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, Group, Run, environment, line, missing

ODD = """
import os, time
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_is_skipped(): pytest.skip("for a reason")
def test_ends_its_process(): os._exit(3)
def test_comes_after(): pass
def test_hangs(): time.sleep(600)
def test_is_too_late(): pass
"""


@pytest.mark.slow
def test_each_test_fails_alone_and_a_group_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    for package in (tmp_path / "tests", folder):
        (package / "__init__.py").write_text("")
    (folder / "reporting.py").write_text((Path(run.__file__).parent / "reporting.py").read_text())
    (folder / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')")
    (folder / "test_odd.py").write_text(ODD)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    options = argparse.Namespace(device="cpu", seconds=300.0, patience=1.0, words=None)
    of_run, began = Run(options, tmp_path, environment(tmp_path)), time.monotonic()
    found = {result.name.partition("::test_")[2]: result for result in of_run.group(Group("gpu/test_odd.py", 20.0))}
    assert time.monotonic() - began < 60
    assert {name: result.outcome for name, result in found.items()} == {
        "passes": PASSED,
        "fails": FAILED,
        "is_skipped": SKIPPED,
        "ends_its_process": FAILED,
        "comes_after": PASSED,
        "hangs": TIMED_OUT,
        "is_too_late": NOT_RUN,
    }
    assert "1 == 2" in found["fails"].reason and "code 3" in found["ends_its_process"].reason
    assert line(found["is_skipped"]).endswith("skipped (Skipped: for a reason)")


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
