"""Times of forward, of each gradient, and of the end of backward: by the host's clock, or by a GPU's own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.core.tuning import Timing
from lightning_parstrat.distributed.comm.clocks import clock_of

Moment = Any
"""Seconds, or a recorded event."""


class BackwardClock:
    """Notes the times of steps that have one backward each. Not collective.

    A hook on each parameter costs about a microsecond per gradient. On a GPU nothing waits until :meth:`timing`.

    Args:
        parameters: In any order; times come in the same.
        device: Device of the gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._clock = clock_of(device)
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
        """Call when a forward begins; forgets the step before."""
        self._backward = self._end = None
        self._ready.clear()
        self.backwards = 0
        self._forward = self._clock.now()

    def begin_backward(self) -> None:
        """Call when a backward begins that will send gradients."""
        self.backwards += 1
        self._ready.clear()
        self._end = None
        self._backward = self._clock.now()

    def end_backward(self) -> None:
        """Call when everything that the backward has sent has arrived, in the order of the device's work.

        Does nothing after a backward without :meth:`begin_backward`.
        """
        if self._backward is not None:
            self._end = self._clock.now()

    @property
    def has_measured(self) -> bool:
        """Whether a backward has ended since the last forward began."""
        return self._end is not None

    def timing(self) -> Timing:
        """The times of the last step; waits for a GPU."""
        forward, backward, end = self._forward, self._backward, self._end
        if forward is None or backward is None or end is None:
            raise AssertionError("the times of a step were asked for that has not ended")
        ready = [0.0] * self._count
        for index, moment in self._ready.items():
            ready[index] = self._clock.seconds(backward, moment)
        last = max(ready, default=0.0)
        # Two readings of a clock: their difference may come out a little below 0.
        exposed = max(self._clock.seconds(backward, end) - last, 0.0)
        return Timing(self._clock.seconds(forward, end), last, exposed, tuple(ready))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, index: int, _: Tensor) -> None:
        # Outside of it, backwards belong to micro-batches that send nothing.
        if self._backward is not None and self._end is None:
            # The last time counts: the gradient of a parameter that is used twice is complete only then.
            self._ready[index] = self._clock.now()
