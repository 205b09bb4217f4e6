"""Trainings whose layers sleep, on an emulated wire: what buckets gain there is known."""

from typing import Any

import torch.distributed as dist

# What users measure with is what the tests train.
from benchmarks.bucketing import Case, SleepingLayers
from benchmarks.slow_wire import SlowWire

__all__ = ["CASES", "SleepingLayers", "slow_wire"]

CASES: dict[str, Case] = {
    "late large tensor": Case([600_000, *[20_000] * 20], 0.04, 1e-3, 1.6e-8, by_size=False),
    "hidden anyway": Case([10_000] * 10, 0.05, 2e-3, 1e-9),
}


def slow_wire(case: Any) -> Any:
    """A process group of this process's ranks, as slow as the case's wire."""
    return SlowWire(dist.group.WORLD, case.latency_seconds, case.seconds_per_byte)
