"""What ranks tell each other while they do something else."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.collectives import Collectives, Work


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
