"""One small message a step: what the hosts know by the end of a backward, combined over all ranks.

It is launched when a backward that sends gradients has ended, and is sent beside the gradients. The step waits for it
when it needs the content. All that ranks have to know by then is in this message, so it costs no further message.
"""

import operator
import struct
import weakref
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives, Tag, doubling_steps
from lightning_parstrat.distributed.comm.work import Exchange, ExchangeThreads, Steps, marked, set_aside


class WeightSum(NamedTuple):
    """Weights of losses, added up.

    Attributes:
        weight: The sum.
        given: How many weights are in it.
        faults: How many ranks had a value that is no weight.
    """

    weight: float = 0.0
    given: float = 0.0
    faults: float = 0.0


class Content(NamedTuple):
    """The content of one rank's message, or of several ranks' combined.

    Attributes:
        flags: A byte for each flag. If any rank has set it, 1, otherwise 0.
        number: The number of the lowest rank.
        is_alike: Whether all ranks have the same number.
        signal: All bits that any rank has set.
        weights: The sum over all ranks.
    """

    flags: bytes
    number: int
    is_alike: bool
    signal: int
    weights: WeightSum


class ControlMessages:
    """Sends the messages of a training, one after the other. Collective: all ranks launch equally many.

    A message has a byte for each flag, and 34 more. It uses recursive doubling. Between two ranks, the backend's
    threads complete it. Among more ranks, a thread of this object takes step after step while the host computes.

    Args:
        control: Its group works on host memory.
    """

    def __init__(self, control: Collectives) -> None:
        self.control = control
        self.signal = 0
        """This rank's signal in every message: 8 bits."""
        self.weigh: Callable[[], WeightSum] = WeightSum
        """This rank's weights. Each launch of a message calls it."""
        self.launched = 0
        """How many messages have been launched so far."""
        self._latest: Exchange | None = None
        has_several_steps = len(doubling_steps(control.rank, control.world_size)) > 1
        self._thread = ExchangeThreads("control messages", most=1) if has_several_steps else None
        # A failed training may have left messages in flight. Another tag separates them from those of the next
        # training.
        self._tag = Tag.CONTROL_MESSAGE + _TRAININGS.get(control.group, 0)
        _TRAININGS[control.group] = _TRAININGS.get(control.group, 0) + 1

    def launch(self, flags: bytes = b"", number: int = 0) -> Exchange:
        """Sends this rank's content, and begins to receive that of others. Collective. It returns at once.

        Args:
            flags: A byte of 0 or 1 for each flag, equally many on all ranks.
            number: The number to compare, of 63 bits and a sign.

        Returns:
            The message. Its :meth:`Exchange.wait` returns the combined :class:`Content`, the same on all ranks.
        """
        self.launched += 1
        self.control.count_small_reduction()
        with marked("lightning_parstrat: send control message"):
            self._latest = Exchange(self._steps(Content(flags, number, True, self.signal, self.weigh())), self._thread)
            self._latest.hand_over()
        return self._latest

    def _steps(self, content: Content) -> Steps:
        return _decoded((yield from self.control.doubling(_encoded(content), _combined, self._tag)))

    def latest(self) -> Content:
        """The combined content of the latest message, after a wait for it. There must have been one."""
        with marked("lightning_parstrat: wait for control message"):
            return cast(Content, cast(Exchange, self._latest).wait())

    def close(self) -> None:
        """Call when a training has ended, also after an error. Not collective."""
        # Not the message, which holds the process group: see ``process_groups.py``.
        if self._latest is not None:
            set_aside([self._latest.in_flight])
        self._latest = None


_TRAININGS: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()

_HEADER = struct.Struct("<q?B3d")


def _encoded(content: Content) -> Tensor:
    header = _HEADER.pack(content.number, content.is_alike, content.signal, *content.weights)
    return torch.frombuffer(bytearray(header + content.flags), dtype=torch.uint8)


def _decoded(message: Tensor) -> Content:
    encoded = message.numpy().tobytes()
    number, is_alike, signal, *weights = _HEADER.unpack_from(encoded)
    return Content(encoded[_HEADER.size :], number, is_alike, signal, WeightSum(*weights))


def _combined(of_lower: Tensor, of_higher: Tensor) -> Tensor:
    lower, higher = _decoded(of_lower), _decoded(of_higher)
    any_set = int.from_bytes(lower.flags, "big") | int.from_bytes(higher.flags, "big")
    return _encoded(
        Content(
            any_set.to_bytes(len(lower.flags), "big"),
            lower.number,
            lower.is_alike and higher.is_alike and lower.number == higher.number,
            lower.signal | higher.signal,
            WeightSum(*map(operator.add, lower.weights, higher.weights)),
        )
    )
