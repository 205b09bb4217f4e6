"""Small messages that all ranks exchange by recursive doubling: their number grows with the logarithm of the ranks'.

A ring, as Gloo's all-reduce is one, takes two latencies for each rank: milliseconds from a hundred ranks on.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parstrat.distributed.comm.process_groups import Message, PointToPoint
from lightning_parstrat.distributed.comm.work import Transfers

Combine = Callable[[Sequence[Tensor]], Tensor]
"""Makes one message of two, that of lower ranks first."""


class Step(NamedTuple):
    """One step of recursive doubling.

    Attributes:
        peer: The other rank.
        sends: Whether this rank sends to it.
        receives: Whether this rank receives from it.
    """

    peer: int
    sends: bool
    receives: bool


def doubling_steps(rank: int, world_size: int) -> list[Step]:
    """The steps of a rank, in order, after which all ranks have combined the messages of all.

    Between 2^k ranks each exchanges with k others. Of another number, those beyond the largest power of two first send
    their message to a lower rank, and receive the result in the end: two latencies more.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section
    4.5.
    """
    taking_part = 1 << (world_size.bit_length() - 1)
    if rank >= taking_part:
        # Apart, as the other receives before it sends: they may have to be connected for either, in one order.
        return [Step(rank - taking_part, True, False), Step(rank - taking_part, False, True)]
    found = [Step(rank ^ (1 << bit), True, True) for bit in range(taking_part.bit_length() - 1)]
    beyond = rank + taking_part
    if beyond < world_size:
        found = [Step(beyond, False, True), *found, Step(beyond, True, False)]
    return found


class DoublingExchange:
    """One exchange among all ranks; collective.

    The first message is on its way when this has been made; the others follow while it is waited for, by this thread or
    by another.

    Args:
        point_to_point: Carries what lies on the host.
        steps: This rank's.
        own: This rank's message: contiguous, and as long as everybody's. It must not be changed until the exchange has
            ended.
        combine: Makes one message of two. The result is the same on all ranks, to the last bit.
        tag: All exchanges of one tag are made by all ranks in the same order.
    """

    def __init__(
        self, point_to_point: PointToPoint, steps: Sequence[Step], own: Tensor, combine: Combine, tag: int
    ) -> None:
        self._point_to_point = point_to_point
        self._doubling_steps = steps
        self._combine = combine
        self._tag = tag
        self._pending: Transfers | None = None
        self._ended_with: Tensor | None = None
        self._transfers = self._run(own)
        self._go_on()

    def is_completed(self) -> bool:
        """Whether all of it has been waited for."""
        return self._ended_with is not None

    @property
    def in_flight(self) -> Transfers | None:
        """What is waited for next; None when all has ended."""
        return self._pending

    def wait(self) -> Tensor:
        """The result of all messages, in every call.

        Raises:
            RuntimeError: A rank has ended, or has not sent its message in time.
        """
        while self._pending is not None:
            self._pending.wait()
            self._go_on()
        if self._ended_with is None:
            raise AssertionError("an exchange has ended without a result")
        return self._ended_with

    def _go_on(self) -> None:
        try:
            self._pending = next(self._transfers)
        except StopIteration as ended:
            self._pending, self._ended_with = None, ended.value

    def _run(self, message: Tensor) -> Generator[Transfers, None, Tensor]:
        """Yields transfers that are to be waited for before it goes on; returns the result."""
        rank = self._point_to_point.rank
        for peer, sends, receives in self._doubling_steps:
            received = torch.empty_like(message)
            messages = [Message(False, received, peer)] * receives + [Message(True, message, peer)] * sends
            yield Transfers(self._point_to_point.launch(messages, self._tag), message, received)
            if receives and not sends and peer < rank:
                # The answer, which this rank's message is already in.
                message = received
            elif receives:
                # In the order of ranks, so that both come to the same bits.
                message = self._combine([message, received] if rank < peer else [received, message])
        return message
