"""The examples, run as their reader would run them."""

import json
from pathlib import Path

import pytest

from tests.comparing import worst
from tests.scripts import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def test_accumulating_over_lines_of_all_lengths(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "accumulation"
    result = run_python([ROOT / "examples/accumulation/main.py", "--epochs", "2", "--output", output], tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(output.with_suffix(".json").read_text())["deviations"]
    for strategy in ("ddp_tuned", "zero1_custom"):
        assert worst(found[strategy]["norm"], found[strategy]["parameters"]) < 1e-5
    assert max(found["ddp"]["norm"]) > 0.1
    assert output.with_suffix(".png").stat().st_size > 10_000
