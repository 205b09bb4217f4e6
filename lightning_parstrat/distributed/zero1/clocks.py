"""When gradients become ready, as all ranks see it."""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.bucketing import optimal_gather_buckets
from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket


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


class NeedClock:
    """Notes when each bucket is first waited for, in seconds since the first was sent, less what others have waited.

    That is when it would have been needed if nothing had to be waited for. On a GPU it is when the host asked for it.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._waited = 0.0
        self._seconds: dict[ParameterBucket, float] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a bucket was sent."""
        return self._began is not None

    def send(self, bucket: ParameterBucket) -> None:
        """Says that a bucket's all-gather was launched."""
        if self._began is None:
            self._began = time.perf_counter()

    def need(self, bucket: ParameterBucket) -> None:
        """Says that somebody wants to read it, before that reader waits."""
        if self._began is not None:
            self._seconds.setdefault(bucket, time.perf_counter() - self._began - self._waited)

    def wait(self, seconds: float) -> None:
        """Says how long readers have waited."""
        self._waited += seconds

    def agree(self, buckets: Sequence[ParameterBucket], control: Collectives) -> list[float]:
        """The earliest time over all ranks for each of ``buckets``; 0 for those that were not sent.

        Collective; one all-reduce of 8 bytes per bucket.
        """
        earliest = torch.tensor([self._seconds.get(bucket, 0.0) for bucket in buckets], dtype=torch.float64)
        control.all_reduce(earliest, op=dist.ReduceOp.MIN).wait()
        seconds: list[float] = earliest.tolist()
        return seconds


def group_gathers(buckets: Sequence[ParameterBucket], needed_seconds: Sequence[float], cost: AlphaBeta) -> None:
    """Has buckets be stepped and gathered together where the forward waits least for that.

    The problem of :func:`~lightning_parstrat.core.bucketing.optimal_gather_buckets`; buckets of gradients are not cut.

    Args:
        buckets: In the order in which they are gathered.
        needed_seconds: When each is needed.
        cost: What one collective takes.
    """
    nbytes = [bucket.layout.numel * bucket.gather_dtype.itemsize for bucket in buckets]
    stops = optimal_gather_buckets(nbytes, needed_seconds, cost).stops
    for number, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        for bucket in buckets[start:stop]:
            bucket.gather_group = number
