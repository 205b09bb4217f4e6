"""The order of work on a GPU's streams; on CPU there is only the order of the program.

torch makes a collective begin after what the launching stream has queued, and keeps its buffers until it is waited for.
What is left to do here: whoever waits later, on whatever stream, must come after it, without the host waiting.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What is asked of a device."""

    are_several: bool
    """Whether there may be work on more than one."""

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

    are_several = False

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

    are_several = True

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


class Arrivals:
    """On which streams gradients have become ready, where those are others than the one that they leave from.

    Autograd runs the end of a gradient's way on the stream that its parameter was first used on: for a captured graph
    that is the one it was captured on. Backward's own stream comes after it when backward has ended, not before.

    Args:
        streams: Those of the gradients' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._home = streams.current()
        self._elsewhere: dict[Hashable, set[Any]] = {}

    def begin(self) -> None:
        """Says that gradients leave from the current stream from now on."""
        self._home = self._streams.current()

    def note(self, together: Hashable) -> None:
        """Says that one of the gradients that travel ``together`` was made on the current stream."""
        current = self._streams.current()
        if current != self._home:
            self._elsewhere.setdefault(together, set()).add(current)

    def forget(self, together: Hashable) -> None:
        """Says that those ``together`` do not leave, or are not there any more."""
        self._elsewhere.pop(together, None)

    @contextmanager
    def at_home(self, together: Hashable) -> Iterator[None]:
        """Within it the current stream is the one that gradients leave from, after all of those ``together`` are made.

        What is freed within it is written again, by the stream that it was made on, only when it has been read.
        """
        # Whoever launches may have made some of them without a hook: what is left over may be anyone's.
        elsewhere = {*self._elsewhere.pop(together, ()), self._streams.current()} - {self._home}
        with self._streams.on(self._home):
            for stream in elsewhere:
                self._streams.wait_for(stream)
            yield
        for stream in elsewhere:
            with self._streams.on(stream):
                self._streams.wait_for(self._home)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Not collective."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
