"""A plugin of pytest's: tells ``run.py``, line by line, which tests there are, which began, and how they ended."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest


def _tell(**told: Any) -> None:
    with Path(os.environ["PARSTRAT_REPORT"]).open("a") as file:
        file.write(json.dumps(told) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell(collected=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(began=nodeid, at=time.time())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    seconds = round(item.stash.get(_SECONDS, 0.0) + call.duration, 2)
    item.stash[_SECONDS] = seconds
    # Of set-up and tear-down only what went wrong; the line of the call comes between them.
    if report.when == "call" or not report.passed:
        _tell(name=item.nodeid, outcome=report.outcome, seconds=seconds, reason=_reason(report))


_SECONDS = pytest.StashKey[float]()


def _reason(report: pytest.TestReport) -> str:
    if report.skipped:
        return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return report.longreprtext[-6000:] if report.failed else ""
