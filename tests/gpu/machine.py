"""Prints where the tests run, as one line of JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from machine import describe_machine

    found = describe_machine()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(describe()))
