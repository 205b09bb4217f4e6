"""The plugin that points Lightning's own tests at one of our strategies."""

from pathlib import Path

import pytest

from tests.lightning_suite.plugin import SCOPES, KnownException, known_exceptions
from tests.scripts import run_python

ROOT = Path(__file__).parent.parent
MOST_EXCEPTIONS = 5
LIKE_LIGHTNINGS = """
from lightning.pytorch import Trainer

EXPECTED = "ZeRO1Strategy"

def strategy_of(**arguments):
    return Trainer(accelerator="cpu", devices=1, logger=False, **arguments).strategy

def test_names_of_ddp():
    for name in ("ddp", "ddp_spawn", "ddp_find_unused_parameters_true"):
        assert type(strategy_of(strategy=name)).__name__ == EXPECTED
    assert strategy_of(strategy=name)._ddp_kwargs["find_unused_parameters"] is True

def test_single_device():
    assert type(strategy_of()).__name__ == EXPECTED

{excepted}
"""
EXCEPTED = """
def {name}():
    raise AssertionError("among the exceptions")
"""


def plain(known: KnownException) -> str:
    return known.test.rpartition("::")[2].partition("[")[0]


@pytest.mark.slow
def test_names_and_single_devices_are_pointed_elsewhere(tmp_path: Path) -> None:
    known = next(one for one in known_exceptions() if "[" not in one.test and one.scope == "any")
    target = tmp_path / known.test.partition("::")[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    excepted = EXCEPTED.format(name=plain(known))
    target.write_text(LIKE_LIGHTNINGS.format(excepted=excepted))
    options = ["--ddp-is=zero1_custom", "--single-devices"]
    command = ["-m", "pytest", "-p", "tests.lightning_suite.plugin", "-q", *options, str(target)]
    finished = run_python(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "2 passed, 1 skipped" in finished.stdout, finished.stdout + finished.stderr


def test_exceptions_are_few_and_have_reasons() -> None:
    assert sum(known.scope == "ours" for known in known_exceptions()) <= MOST_EXCEPTIONS
    for known in known_exceptions():
        # One test, or one case of it, each.
        assert known.scope in SCOPES and "::test_" in known.test and "*" not in known.test
        assert len(known.reason.split()) > 4
