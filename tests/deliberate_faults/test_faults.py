"""The list of deliberate faults still fits the package and the tests; ``run.py`` tries the faults themselves."""

import ast
import re
from pathlib import Path

import pytest

from tests.deliberate_faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent.parent


def names_of_tests(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in_and_has_tests(fault: Fault) -> None:
    text = (ROOT / "lightning_parstrat" / fault.file).read_text()
    assert text.count(fault.old) == 1 and "\n" not in fault.old
    changed = text.replace(fault.old, fault.new)
    assert changed != text
    compile(changed, fault.file, "exec")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not name or re.sub(r"\[.*", "", name) in names_of_tests(ROOT / file), test


def test_most_are_found_by_make_test() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
    assert sum(not fault.slow for fault in FAULTS) >= 15
    assert len({fault.file for fault in FAULTS}) >= 15
