"""The order of work on a GPU's streams; on CPU there is only the order of the program.

torch makes a collective begin after what the launching stream has queued, and keeps its buffers until it is waited for.
What is left to do here: whoever waits later, on whatever stream, must come after it, without the host waiting.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import override


class Streams:
    """A CPU's: work runs in the order of the program."""

    are_several = False
    """Whether there may be work on more than one."""

    def current(self) -> Any:
        """The stream that is queued on now."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, ``stream`` is the current one."""
        return nullcontext()

    def another(self) -> Any:
        """A stream beside all others, where the device has several."""
        return None

    def wait_for(self, stream: Any) -> None:
        """Has the current stream wait for what ``stream`` has queued so far."""


class CudaStreams(Streams):
    """A GPU's.

    Args:
        device: The GPU.
    """

    are_several = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    @override
    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    @override
    def another(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @override
    def wait_for(self, stream: torch.cuda.Stream) -> None:
        self.current().wait_stream(stream)


class Arrivals:
    """The streams on which gradients became ready, if not on the one that reductions are launched from.

    Autograd runs the end of a gradient's way on the stream that its parameter was first used on: for a captured graph
    that is the one it was captured on. Backward's own stream comes after it when backward has ended, not before.

    Args:
        streams: Those of the gradients' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._launching = streams.current()
        self._others: dict[Hashable, set[Any]] = {}

    def begin(self) -> None:
        """Reductions are launched from the current stream from now on."""
        self._launching = self._streams.current()

    def note(self, bucket: Hashable) -> None:
        """A gradient of the bucket became ready on the current stream."""
        current = self._streams.current()
        if current != self._launching:
            self._others.setdefault(bucket, set()).add(current)

    def forget(self, bucket: Hashable) -> None:
        """The gradients of the bucket are not reduced, or do not exist any more."""
        self._others.pop(bucket, None)

    @contextmanager
    def waited_for(self, bucket: Hashable) -> Iterator[None]:
        """Within it the current stream is the launching one, which waits for all gradients of the bucket.

        Their streams wait in turn, so that memory that is freed within it is written again only when it was read.
        """
        # The current stream may have made some of them without a hook: those that are left over.
        others = {*self._others.pop(bucket, ()), self._streams.current()} - {self._launching}
        with self._streams.on(self._launching):
            for stream in others:
                self._streams.wait_for(stream)
            yield
        for stream in others:
            with self._streams.on(stream):
                self._streams.wait_for(self._launching)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device. Not collective."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
