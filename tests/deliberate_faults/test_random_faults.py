"""Ten of the deliberate faults, others every day, are found by the tests that are named with them."""

import datetime
import os
import random
import time
from pathlib import Path

import pytest

from tests.deliberate_faults.faults import FAULTS
from tests.deliberate_faults.run import copy_project, missed_of

DRAWN = 10
SECONDS = 200.0
"""After which no other is begun: the machine may be busy."""


@pytest.mark.slow
def test_faults_that_are_drawn_by_the_day_are_found(tmp_path: Path) -> None:
    seed = os.environ.get("PARSTRAT_FAULTS_SEED", f"{datetime.date.today()}")
    print(f"PARSTRAT_FAULTS_SEED={seed}")
    copy_project(tmp_path)
    began = time.monotonic()
    for fault in random.Random(seed).sample(FAULTS, DRAWN):
        assert missed_of([fault], tmp_path) == [], f"PARSTRAT_FAULTS_SEED={seed} draws it again"
        if time.monotonic() - began > SECONDS:
            break
