"""When a forward begins, gradients become ready, and a backward has ended: on the host, or on the GPU's own clock."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.core.tuning import Timing

Moment = Any
"""Seconds, or a recorded event."""


class BackwardClock:
    """Notes the times of steps that have one backward each. Not collective.

    A hook on each parameter costs about a microsecond per gradient. On a GPU nothing waits until the times are asked
    for.

    Args:
        parameters: In any order, which is that of the times.
        device: Where the gradients are.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._count = len(parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]
        self._ready: dict[int, Moment] = {}
        self._forward: Moment | None = None
        self._backward: Moment | None = None
        self._end: Moment | None = None
        self.backwards = 0

    def begin_forward(self) -> None:
        """Says that a forward begins, and forgets what came before."""
        self._backward = self._end = None
        self._ready.clear()
        self.backwards = 0
        self._forward = self._now()

    def begin_backward(self) -> None:
        """Says that a backward begins which is going to send gradients."""
        self.backwards += 1
        self._ready.clear()
        self._end = None
        self._backward = self._now()

    def end_backward(self) -> None:
        """Says that everything that the backward has sent has arrived, in the order of the device's work.

        After a backward that was not announced it does nothing.
        """
        if self._backward is not None:
            self._end = self._now()

    @property
    def has_measured(self) -> bool:
        """Whether a backward has ended since the last forward began."""
        return self._end is not None

    def timing(self) -> Timing:
        """The times of the last step; waits for a GPU."""
        forward, backward, end = self._forward, self._backward, self._end
        if forward is None or backward is None or end is None:
            raise AssertionError("the times of a step were asked for that has not ended")
        if self._device.type == "cuda":
            end.synchronize()
        ready = [0.0] * self._count
        for index, moment in self._ready.items():
            ready[index] = self._seconds(backward, moment)
        last = max(ready, default=0.0)
        exposed = max(self._seconds(backward, end) - last, 0.0)
        return Timing(self._seconds(forward, end), last, exposed, tuple(ready))

    def close(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, index: int, _: Tensor) -> None:
        # What comes before or after it are micro-batches that send nothing.
        if self._backward is not None and self._end is None:
            # A parameter that is used again has its gradient when the last use has been gone through.
            self._ready[index] = self._now()

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, start: Moment, stop: Moment) -> float:
        if self._device.type != "cuda":
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1000
