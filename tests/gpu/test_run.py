"""What runs the tests of this folder: what it installs, and which files it runs."""

from pathlib import Path

from tests.gpu import run
from tests.gpu.run import missing


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
