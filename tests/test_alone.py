"""Two processes, of which one says that it measures."""

import threading
from pathlib import Path

import pytest

from tests.alone import beside_others


@pytest.mark.parametrize(
    ("first", "second", "together"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_who_measures_is_alone(tmp_path: Path, first: bool, second: bool, together: bool) -> None:
    # Locks belong to open files, so threads stand for processes.
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with beside_others(tmp_path, alone=second):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with beside_others(tmp_path, alone=first):
        thread.start()
        assert entered.wait(20 if together else 0.3) is together
    assert entered.wait(20)
    leave.set()
    thread.join()
