"""Transfers that arrive as late as they may: until somebody waits for them, what they bring is NaN.

The transfers themselves are those of the collectives that are passed. On a GPU they arrive on a stream of their own,
after a sleep of the device, and whoever waits has only its stream wait; on CPU they arrive when somebody waits.
World size 1 is as any other: its shards arrive late, too, though nothing is sent.
"""

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat import ZeRO1Strategy, ZeRO3Strategy
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.engine import engine
from lightning_parstrat.distributed.engine.gatherer import InFlightParameter
from tests.strategies.parity import zero1, zero3

PAUSES = (0.0, 0.0, 0.002, 0.005)
"""Seconds, one of which each transfer takes longer than it would."""
DRAW = random.Random(0)
"""Of pauses, anew for each training, and differently on each rank."""
CYCLES_PER_SECOND = 1.5e9
"""Of a GPU, about: how long a sleep is does not matter, only that it is longer than the launch of a kernel."""


class OnStream:
    """Arrives on a stream of a GPU's, some time after this was made, or after it was first waited for.

    Args:
        arrive: Queues what makes it arrive.
        stream: Where.
        by_itself: Whether it arrives though nobody waits.
    """

    def __init__(self, arrive: Callable[[], None], stream: torch.cuda.Stream, by_itself: bool) -> None:
        self._arrive: Callable[[], None] | None = arrive
        self._stream = stream
        self._launched = torch.cuda.current_stream().record_event()
        self._arrived: torch.cuda.Event | None = None
        if by_itself:
            self._begin()

    def _begin(self) -> None:
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._stream.wait_event(self._launched)
            # Never 0: who reads on a stream that has not waited comes too early.
            torch.cuda._sleep(int((0.0005 + DRAW.choice(PAUSES)) * CYCLES_PER_SECOND))
            self._arrive()
            self._arrived = self._stream.record_event()

    def wait(self) -> None:
        if self._arrived is None:
            self._begin()
        torch.cuda.current_stream().wait_event(self._arrived)
        # The memory is the launching stream's again, as with torch's own.
        self._arrive = None

    def is_completed(self) -> bool:
        return self._arrived is not None and self._arrived.query()


class OnHost:
    """Arrives when it is first waited for, by whichever thread.

    Args:
        arrive: Makes it arrive; may be called once.
    """

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive: Callable[[], None] | None = arrive
        self._lock = threading.Lock()

    @torch.no_grad()
    def wait(self) -> None:
        with self._lock:
            if self._arrive is not None:
                self._arrive()
                self._arrive = None

    def is_completed(self) -> bool:
        return self._arrive is None


def pause() -> None:
    time.sleep(DRAW.choice(PAUSES))


class LateCollectives(Collectives):
    """Passes everything on; what arrives is NaN until it has been waited for, also where that is on another stream.

    Args:
        inner: Send it.
        by_itself: Whether it arrives after a while though nobody waits.

    Attributes:
        launched: How many of each kind.
    """

    def __init__(self, inner: Collectives, by_itself: bool) -> None:
        self.inner, self.by_itself = inner, by_itself
        super().__init__(inner.group, inner.shard_groups)
        DRAW.seed(dist.get_rank())
        self.widens = inner.widens
        self.launched: Counter[str] = Counter()
        self._stream: Any = None

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, sent: int) -> None:
        self.inner.bytes_sent = sent

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Any) -> Work:
        self._set_off("reduce-scatter", buffer)
        # Copied first: NaN goes to the shard at once, which may be a part of the buffer.
        sent = buffer.clone()
        with self._beside(buffer):
            received = torch.empty_like(shard)
            work = self.inner._reduce_scatter(sent, received, bounds)
        return self._late(work, sent, received, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Any) -> Work:
        self._set_off("all-gather", buffer)
        arrived = buffer.clone()
        with self._beside(buffer):
            work = self.inner._all_gather(arrived, bounds)
        return self._late(work, arrived, arrived, buffer)

    def _set_off(self, kind: str, buffer: Tensor) -> None:
        self.launched[kind] += 1
        if not self.by_itself:
            return
        if buffer.is_cuda:
            torch.cuda._sleep(int(DRAW.choice(PAUSES) * CYCLES_PER_SECOND))
        elif self.world_size > 1:
            # Ranks set off at different times.
            pause()

    @contextmanager
    def _beside(self, buffer: Tensor) -> Iterator[None]:
        """Launches on the stream that waits, on a GPU: what a transfer allocates is that stream's, and freed there."""
        if not buffer.is_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _late(self, work: Work, sent: Tensor, arrived: Tensor, target: Tensor) -> Work:
        arrive = functools.partial(_arrive, work, sent, arrived, target)
        with torch.no_grad():
            target.fill_(float("nan"))
        if not target.is_cuda:
            return OnHost(arrive)
        return OnStream(arrive, self._stream, self.by_itself)


def _arrive(work: Work, sent: Tensor, arrived: Tensor, target: Tensor) -> None:
    """What was ``sent`` is the launching stream's memory, and is held here until that stream has waited."""
    work.wait()
    target.copy_(arrived)


class LateZeRO1(ZeRO1Strategy):
    """``zero1_custom`` whose gradients and parameters arrive late; counts parameters in flight after a step.

    Attributes:
        wires: What carries gradients and parameters, or has.
    """

    def __init__(self, by_itself: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.by_itself = by_itself
        self.under_way = self.under_way_last = 0
        self.wires: list[LateCollectives] = []

    @property
    def launched(self) -> Counter[str]:
        """How many transfers of each kind set off."""
        return sum((wire.launched for wire in self.wires), Counter())

    @override
    def _shard(self, optimizers: list[Optimizer]) -> None:
        with self._late_wires():
            super()._shard(optimizers)
        gatherer = self._engine.gatherer
        finish_prompt = gatherer.finish_prompt

        def count() -> None:
            finish_prompt()
            parameters = self.lightning_module.parameters()
            self.under_way_last = sum(type(one) is InFlightParameter for one in parameters)
            self.under_way += self.under_way_last

        gatherer.finish_prompt = count

    @contextmanager
    def _late_wires(self) -> Iterator[None]:
        """Within it an engine gets late collectives, whatever the world size."""
        make = engine.make_collectives

        def make_late(*arguments: Any, **named: Any) -> LateCollectives:
            self.wires.append(LateCollectives(make(*arguments, **named), self.by_itself))
            return self.wires[-1]

        engine.make_collectives = make_late
        try:
            yield
        finally:
            engine.make_collectives = make
        # Connecting is no transfer of the training's.
        for wire in self.wires:
            wire.launched.clear()


# Nothing arrives before somebody waits; or all after a moment of random length, on CPU because ranks set off at
# different times.
late = functools.partial(zero1, LateZeRO1)
delayed = functools.partial(zero1, LateZeRO1, by_itself=True)


class LateTransfers:
    """In the place of FSDP2's: what they bring is NaN for a while, on the stream that they are asked for on."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _arrive_late(self, output: Tensor) -> None:
        if not output.is_cuda:
            pause()
            return
        arrived = output.clone()
        # FSDP2 gathers several dtypes as bytes: with all bits set, a number in bf16 or fp32 is NaN.
        output.fill_(255 if output.dtype == torch.uint8 else float("nan"))
        torch.cuda._sleep(int((0.0005 + DRAW.choice(PAUSES)) * CYCLES_PER_SECOND))
        output.copy_(arrived)


class LateGather(LateTransfers):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        self._arrive_late(output_tensor)


class LateReduceScatter(LateTransfers):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        self._arrive_late(output_tensor)


class LateZeRO3(ZeRO3Strategy):
    """``zero3_custom`` on a wire that takes its time. One rank sends nothing."""

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        DRAW.seed(dist.get_rank())
        for part in self.lightning_module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(LateGather())
                part.set_custom_reduce_scatter(LateReduceScatter())


# All that FSDP2 sends and gathers arrives after a moment, and is NaN on a GPU until then.
late_zero3 = functools.partial(zero3, LateZeRO3)
