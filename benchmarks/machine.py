"""What a result file says of where it was measured."""

import contextlib
import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import command_line
from lightning_parstrat import __version__


def describe_machine() -> dict[str, Any]:
    """Processor, cores, versions, time, and the command that was run."""
    return {
        "processor": _processor(),
        "cores_visible": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **_versions(),
        **_gpu(),
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Ranks that a program started know what the user typed.
        "command": command_line(),
    }


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    # Either of them is enough.
    for name in ("lightning", "pytorch-lightning"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    # Not the distribution's: a machine may have the sources alone.
    return found | {"lightning-parstrat": __version__}


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
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
