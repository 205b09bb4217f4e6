"""The table of the page on scale says what was counted, and what was counted keeps to what the page promises."""

import math
from pathlib import Path

import pytest

from benchmarks.scale.phases import Row, markdown, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def test_the_page_has_the_table_of_what_was_counted() -> None:
    lines = list(markdown(rows()))
    assert len(lines) > 30 and "\n".join(lines) in PAGE.read_text()


def test_exponents() -> None:
    numbers = {"8": 1, "64": 10, "512": 40, "1024": 40}
    assert Row("", "", numbers, {}).exponent == pytest.approx(0.5)
    assert Row("", "", dict.fromkeys(numbers, 0), {}).exponent == 0
    assert Row("", "", {**numbers, "64": 0}, {}).exponent == math.inf


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.phase}, {row.counter}")
def test_what_grows(row: Row) -> None:
    if row.counter == "messages sent":
        assert row.exponent <= 0.2
    elif row.counter == "items" or row.counter.startswith("largest buffer"):
        assert row.exponent <= 0.05
    elif row.counter == "objects received, bytes" and row.phase != "full save":
        assert not any(row.after.values())
    if (row.phase, row.counter) == ("load, sharded", "largest buffer, bytes"):
        # Weights, which every rank read for itself before, come in blocks of those that read them.
        assert len(set(row.after.values())) == 1
    elif row.before:
        assert row.phase == "set-up" or row.after["1024"] <= row.before["1024"]
