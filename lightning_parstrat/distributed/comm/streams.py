"""The order of work on a GPU's streams; on CPU there is only the order of the program.

torch makes a collective begin after what the launching stream has queued, and keeps its buffers until it is waited for.
What is left to do here: whoever waits later, on whatever stream, must come after it, without the host waiting.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What the gatherer asks of a device."""

    def current(self) -> Any:
        """The stream that is queued on now."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, ``stream`` is the current one."""

    def another(self) -> Any:
        """A stream beside all others, where the device has several."""

    def wait_for(self, stream: Any) -> None:
        """Has the current stream wait for what ``stream`` has queued so far."""


class HostStreams:
    """A CPU's: work runs in the order of the program."""

    def current(self) -> Hashable:
        """The only one."""
        return None

    def on(self, stream: Hashable) -> AbstractContextManager[object]:
        """Changes nothing."""
        return nullcontext()

    def another(self) -> Hashable:
        """The only one."""
        return None

    def wait_for(self, stream: Hashable) -> None:
        """Has nothing to wait for."""


class CudaStreams:
    """A GPU's.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.cuda.Stream:
        """The stream that is queued on now."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Within it, ``stream`` is the current one."""
        return torch.cuda.stream(stream)

    def another(self) -> torch.cuda.Stream:
        """A new one."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Has the current stream wait for what ``stream`` has queued so far, by an event."""
        self.current().wait_stream(stream)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Not collective."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
