"""When gradients become ready, as all ranks see it."""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives


class ReadyClock:
    """Notes when each gradient of one backward was last accumulated, in seconds since it was made.

    On a GPU that is when the host had queued it: the order is the device's, the distances are not.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[Tensor, float] = {}

    def note(self, parameter: Tensor) -> None:
        """Says that a gradient is there."""
        self._seconds[parameter] = time.perf_counter() - self._began

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
        times = [self._seconds.get(parameter, never) for parameter in parameters]
        latest = torch.tensor([*times, float(hindered)], dtype=torch.float64)
        control.all_reduce(latest, op=dist.ReduceOp.MAX).wait()
        *seconds, any_hindered = latest.tolist()
        if any_hindered:
            return None
        return {p: math.inf if when == never else when for p, when in zip(parameters, seconds, strict=True)}
