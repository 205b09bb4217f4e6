"""Some of the deliberate faults, others every day, are found by the tests that are named with them."""

import datetime
import os
import random
from pathlib import Path

import pytest

from tests.deliberate_faults.faults import FAULTS
from tests.deliberate_faults.run import copy_project, missed_of

DRAWN = 10


@pytest.mark.slow
def test_faults_that_are_drawn_by_the_day_are_found(tmp_path: Path) -> None:
    seed = os.environ.get("PARSTRAT_FAULTS_SEED", f"{datetime.date.today()}")
    print(f"PARSTRAT_FAULTS_SEED={seed}")
    drawn = random.Random(seed).sample(FAULTS, DRAWN)
    copy_project(tmp_path)
    assert missed_of(drawn, tmp_path) == [], f"PARSTRAT_FAULTS_SEED={seed} draws them again"
