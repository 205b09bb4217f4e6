"""The plugin that points Lightning's own tests at ZeRO1Strategy."""

from pathlib import Path

import pytest

from tests.lightning_suite.plugin import known_exceptions
from tests.scripts import run_python

ROOT = Path(__file__).parent.parent
LIKE_LIGHTNINGS = """
from lightning.pytorch import Trainer

def strategy_of(**arguments):
    return type(Trainer(accelerator="cpu", devices=1, logger=False, **arguments).strategy).__name__

def test_names_of_ddp():
    for name in ("ddp", "ddp_spawn", "ddp_find_unused_parameters_true"):
        assert strategy_of(strategy=name) == "ZeRO1Strategy"

def test_single_device():
    assert strategy_of() == "ZeRO1Strategy"

def test_ddp_wrapper():
    raise AssertionError("among the exceptions")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "outcome"), [([], "1 failed, 1 passed, 1 skipped"), (["--zero1-single-device"], "2 passed, 1 skipped")]
)
def test_names_and_single_devices_are_pointed_at_zero1(tmp_path: Path, options: list[str], outcome: str) -> None:
    target = tmp_path / "tests_pytorch" / "strategies" / "test_ddp.py"
    target.parent.mkdir(parents=True)
    target.write_text(LIKE_LIGHTNINGS)
    command = ["-m", "pytest", "-p", "tests.lightning_suite.plugin", "-q", *options, "tests_pytorch"]
    finished = run_python(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert outcome in finished.stdout, finished.stdout + finished.stderr


def test_every_exception_has_a_reason() -> None:
    assert len(known_exceptions()) > 5
    for known in known_exceptions():
        assert "::test_" in known.pattern and len(known.reason.split()) > 4
