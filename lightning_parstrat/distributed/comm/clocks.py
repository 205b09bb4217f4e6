"""When something was done: by the host's clock, or by a GPU's own, which the host runs ahead of."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Notes moments, and tells how far apart two of them were."""

    def now(self) -> Any:
        """This moment in the order of the device's work. Waits for nothing."""

    def seconds(self, start: Any, stop: Any) -> float:
        """From one moment to another; waits until a GPU has come to the second."""


class HostClock:
    """A CPU's."""

    def now(self) -> float:
        """Seconds from any origin."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """The difference."""
        return stop - start


class CudaClock:
    """A GPU's. The host's clock would give when work was queued, not when it was done.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Between the two events, once the second has come."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock of a device. Not collective."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
