"""Prints where the tests run, as one line of JSON."""

import json
from typing import Any

import torch

from benchmarks.machine import describe_machine


def describe() -> dict[str, Any]:
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
