"""What a result file says of where it was measured."""

import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ranks import COMMAND_VARIABLE


def describe_machine() -> dict[str, Any]:
    """Processor, cores, versions, time, and the command that was run."""
    return {
        "processor": _processor(),
        "cores_visible": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "lightning-parstrat")},
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Ranks that a program started know what the user typed.
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(["python", *sys.argv]),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write_result(result: dict[str, Any], target: Path | None) -> None:
    """Writes the result with the machine it was measured on, if there is somewhere to write it."""
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": describe_machine(), **result}, indent=2) + "\n")
