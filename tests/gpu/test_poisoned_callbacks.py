"""Callbacks, averages of weights, validation, checkpoints and failures at world size 1, where all arrives late."""

from pathlib import Path

import pytest

from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.test_callbacks import CASES, compare

# Of three ranks, whose failures are of several kinds; one kind is enough here.
NAMES = [name for name in CASES if not name.startswith("KeyboardInterrupt")]


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "exponential averaging", NAMES))
def test_shows_what_the_oracle_shows(ranks: RankPool, tmp_path: Path, name: str) -> None:
    ((everything, losses),) = ranks.run(1, compare, name, "late", str(tmp_path))
    assert everything <= CASES[name].tolerance
    assert losses <= 10 * CASES[name].tolerance
