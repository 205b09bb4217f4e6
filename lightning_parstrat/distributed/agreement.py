"""What ranks tell each other: values of any kind, and numbers while they do something else."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.collectives import Collectives, Work


def told_by_first(value: Any, control: Collectives) -> Any:
    """Rank 0's value, on all ranks. Collective; pickled."""
    return broadcast_object(value, control.group)


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """The value of the group's rank 0, on all of its ranks. Collective; pickled; works on host memory."""
    holder = [value]
    dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]


def told_by_all(value: Any, control: Collectives) -> list[Any]:
    """Each rank's value, on all ranks. Collective; pickled."""
    values: list[Any] = [None] * control.world_size
    dist.all_gather_object(values, value, group=control.group)
    return values


def told_to_first(value: Any, control: Collectives) -> list[Any]:
    """Each rank's value on rank 0, nothing elsewhere. Collective; pickled."""
    values: list[Any] | None = [None] * control.world_size if control.rank == 0 else None
    dist.gather_object(value, values, group=control.group, group_dst=0)
    return values or []


class RunningAgreement:
    """The largest of the numbers that ranks have, asked for now and answered later.

    Collective: all ranks must call :meth:`ask` equally often. A question is a non-blocking all-reduce of 4 bytes on the
    host, whose latency grows with the logarithm of the world size.

    Args:
        control: Its group works on host memory.
    """

    def __init__(self, control: Collectives) -> None:
        self._control = control
        self._asked: tuple[Tensor, Work] | None = None

    def ask(self, number: int) -> None:
        """Sends this rank's number; the answer to an earlier question must have been taken."""
        sent = torch.tensor(number, dtype=torch.int32)
        self._asked = sent, self._control.all_reduce(sent, op=dist.ReduceOp.MAX)

    def answer(self, default: int = 0) -> int:
        """The largest number of those that were asked for last; ``default`` before anything was asked."""
        if self._asked is None:
            return default
        (received, work), self._asked = self._asked, None
        work.wait()
        return int(received)
