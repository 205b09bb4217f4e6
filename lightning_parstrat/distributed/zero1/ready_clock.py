"""When gradients become ready, as all ranks see it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.clocks import clock_of
from lightning_parstrat.distributed.comm.collectives import Collectives


class ReadyClock:
    """Notes when each gradient of one backward was last accumulated, in seconds since it was made.

    Args:
        device: Of the gradients; nothing waits for it until :meth:`agree`.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._began = self._clock.now()
        self._moments: dict[Tensor, Any] = {}

    def note(self, parameter: Tensor) -> None:
        """Says that a gradient is there."""
        self._moments[parameter] = self._clock.now()

    def agree(self, parameters: Sequence[Tensor], hindered: bool, control: Collectives) -> dict[Tensor, float] | None:
        """The latest time over all ranks for each of ``parameters``; infinity where no rank had a gradient.

        Collective; one all-reduce of 8 bytes per parameter.

        Args:
            parameters: The same on all ranks, in the same order.
            hindered: Whether this rank cannot do anything with the answer.
            control: Works on host memory.

        Returns:
            The times, the same on all ranks; None where any rank was hindered.
        """
        never = -1.0
        seconds_of = {p: self._clock.seconds(self._began, moment) for p, moment in self._moments.items()}
        times = [seconds_of.get(parameter, never) for parameter in parameters]
        latest = torch.tensor([*times, float(hindered)], dtype=torch.float64)
        control.all_reduce(latest, op=dist.ReduceOp.MAX).wait()
        *seconds, any_hindered = latest.tolist()
        if any_hindered:
            return None
        return {p: math.inf if when == never else when for p, when in zip(parameters, seconds, strict=True)}
