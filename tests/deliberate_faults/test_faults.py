"""The list of deliberate faults still fits the package and the tests, and ten of them a day are found."""

import ast
import datetime
import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.deliberate_faults.faults import FAULTS
from tests.deliberate_faults.run import ROOT, copy_project, missed_of

DRAWN = 10
SECONDS = 120.0
"""After which no other is begun: the machine may be busy."""


def names_of_tests(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_fault_can_be_put_in_and_has_tests() -> None:
    for fault in FAULTS:
        text = (ROOT / "lightning_parstrat" / fault.file).read_text()
        assert text.count(fault.old) == 1, fault.name
        changed = text.replace(fault.old, fault.new)
        assert changed != text, fault.name
        compile(changed, fault.file, "exec")
        file, _, name = fault.test.partition("::")
        assert not name or re.sub(r"\[.*", "", name) in names_of_tests(ROOT / "tests" / file), fault.test
        assert (ROOT / "tests" / file).exists(), fault.test


@pytest.mark.slow
def test_random_faults_that_are_drawn_by_the_day_are_found(tmp_path: Path) -> None:
    seed = os.environ.get("PARSTRAT_FAULTS_SEED", f"{datetime.date.today()}")
    print(f"PARSTRAT_FAULTS_SEED={seed}")
    copy_project(tmp_path)
    began = time.monotonic()
    for fault in random.Random(seed).sample(FAULTS, DRAWN):
        assert missed_of([fault], tmp_path) == [], f"PARSTRAT_FAULTS_SEED={seed} draws it again"
        if time.monotonic() - began > SECONDS:
            break
