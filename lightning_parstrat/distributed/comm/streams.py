"""The order of work on a GPU, where it is ours to see to; on CPU there is one order only.

A collective begins after what the launching stream has queued, and keeps its buffers until it is waited for; both are
torch's doing. Ours is that whoever waits later, on whatever stream, comes after it: no host ever waits.
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

    def wait_for(self, stream: Any) -> None:
        """Has the current stream wait for what ``stream`` has queued so far."""


class HostStreams:
    """A CPU's: things happen in the order of the program."""

    def current(self) -> Hashable:
        """There is but one."""
        return None

    def on(self, stream: Hashable) -> AbstractContextManager[object]:
        """Changes nothing."""
        return nullcontext()

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

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Has the current stream wait for what ``stream`` has queued so far, by an event."""
        self.current().wait_stream(stream)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Not collective."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
