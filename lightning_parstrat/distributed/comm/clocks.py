"""When something was done: by the host's clock, or by a GPU's own, which the host runs ahead of."""

import time
from typing import Any

import torch
from typing_extensions import override


class Clock:
    """A CPU's."""

    def now(self) -> Any:
        """This point in the order of the device's work. Waits for nothing."""
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """From one point to another; waits until a GPU has come to the second."""
        return float(stop - start)


class CudaClock(Clock):
    """A GPU's. The host's clock would give when work was queued, not when it was done.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock of a device. Not collective."""
    return CudaClock(device) if device.type == "cuda" else Clock()
