"""Writes what was killed, where that hit, and how it went on, where ``PARSTRAT_KILLS_RESULT`` names a file for it."""

import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import describe_machine

TARGET = os.environ.get("PARSTRAT_KILLS_RESULT")
COUNTED = ("strategy", "saving", "world_size", "whole_job", "point", "hit", "resumed_after_step")

_killed: list[dict[str, Any]] = []
_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = [json.loads(str(value)) for name, value in report.user_properties if name == "kill"]
    if report.when == "call":
        _killed.extend(found)
    if report.failed and "test_kills" in report.nodeid:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Of several workers, the process that hears of all reports.
    if TARGET is None or hasattr(session.config, "workeroutput"):
        return
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PARSTRAT_KILLS")]
    command = " ".join([*variables, "python -m pytest", shlex.join(session.config.invocation_params.args)])
    counts = {name: Counter(str(kill[name]) for kill in _killed) for name in COUNTED}
    result = {
        "machine": {**describe_machine(), "command": command},
        "exact_resumes": len(_killed),
        "failed": _failed,
        "counts": {name: dict(sorted(count.items())) for name, count in counts.items()},
        "kills": sorted(_killed, key=lambda kill: kill["seed"]),
    }
    Path(TARGET).write_text(json.dumps(result, indent=2) + "\n")
