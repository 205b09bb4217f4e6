"""Small messages that all ranks exchange, in rounds whose number grows with the logarithm of the number of ranks.

A ring, as Gloo's all-reduce is one, takes two latencies for each rank: milliseconds from a hundred ranks on.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from lightning_parstrat.core.rounds import Rounds
from lightning_parstrat.distributed.comm.process_groups import Message, PointToPoint
from lightning_parstrat.distributed.comm.work import Transfers

Together = Callable[[Sequence[Tensor]], Tensor]
"""Makes one message of several, in the order of the ranks that they come from."""


class RoundsExchange:
    """One exchange; :func:`~lightning_parstrat.core.rounds.exchange_rounds` says who exchanges with whom.

    Collective. The first messages are on their way when this has been made; the others follow while it is waited for,
    by this thread or by another.

    Args:
        point_to_point: Carries what lies on the host.
        rounds: Of this rank.
        own: This rank's message: contiguous, and as long as everybody's. It must not be changed until the exchange has
            ended.
        together: Makes one message of several; all ranks come to the same, to the last bit.
        tag: All exchanges of one tag are made by all ranks in the same order.
    """

    def __init__(self, point_to_point: PointToPoint, rounds: Rounds, own: Tensor, together: Together, tag: int) -> None:
        self._point_to_point = point_to_point
        self._rounds = rounds
        self._together = together
        self._tag = tag
        self._pending: Transfers | None = None
        self._ended_with: Tensor | None = None
        self._steps = self._go_through_rounds(own)
        self._go_on()

    @property
    def has_ended(self) -> bool:
        """Whether somebody has waited for all of it."""
        return self._ended_with is not None

    @property
    def in_flight(self) -> Transfers | None:
        """What is waited for next; None when all has ended."""
        return self._pending

    def wait(self) -> Tensor:
        """What came of all messages; the same when asked again.

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
            self._pending = next(self._steps)
        except StopIteration as ended:
            self._pending, self._ended_with = None, ended.value

    def _go_through_rounds(self, message: Tensor) -> Generator[Transfers, None, Tensor]:
        """Yields transfers that are to be waited for before it goes on; returns what came of all messages."""
        rounds = self._rounds
        if rounds.left_to is not None:
            answer = torch.empty_like(message)
            sent = self._transfers(message, send_to=[rounds.left_to], receive={})
            # Apart, as the other receives before it sends: they may have to be connected for either, in one order.
            yield self._transfers(message, send_to=[], receive={rounds.left_to: answer})
            yield sent
            return answer
        if rounds.speaks_for is not None:
            received = torch.empty_like(message)
            yield self._transfers(message, send_to=[], receive={rounds.speaks_for: received})
            message = self._together([message, received])
        for group in rounds.groups:
            others = {rank: torch.empty_like(message) for rank in group if rank != rounds.rank}
            yield self._transfers(message, send_to=others, receive=others)
            # In the order of ranks: sums come out the same on all of them.
            message = self._together([others.get(rank, message) for rank in group])
        if rounds.speaks_for is not None:
            yield self._transfers(message, send_to=[rounds.speaks_for], receive={})
        return message

    def _transfers(self, message: Tensor, send_to: Iterable[int], receive: Mapping[int, Tensor]) -> Transfers:
        messages = [Message(False, room, rank) for rank, room in receive.items()]
        messages += [Message(True, message, rank) for rank in send_to]
        messages.sort(key=attrgetter("peer"))
        return Transfers(self._point_to_point.launch(messages, self._tag), message, *receive.values())
