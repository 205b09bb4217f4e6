"""Gathers that arrive as late as they may: until somebody waits for a bucket, what others own of it is NaN."""

import random
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.zero1.read_guard import InFlightParameter
from tests.strategies.parity import zero1


class LateCollectives(PairwiseCollectives):
    """Fetches at once, and hands over when it is waited for."""

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        arrived = buffer.clone()
        super()._all_gather(arrived, bounds).wait()
        buffer[: bounds[self.rank]].fill_(float("nan"))
        buffer[bounds[self.rank + 1] :].fill_(float("nan"))
        return _Arrival(buffer, arrived)


class _Arrival:
    def __init__(self, buffer: Tensor, arrived: Tensor) -> None:
        self._buffer, self._arrived = buffer, arrived

    def wait(self) -> None:
        self._buffer.copy_(self._arrived)

    def is_completed(self) -> bool:
        return False


class DelayedCollectives(PairwiseCollectives):
    """Launches and arrives after a moment of random length, different on each rank."""

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        _pause()
        return _Delayed(super()._reduce_scatter(buffer, shard, bounds))

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        _pause()
        return _Delayed(super()._all_gather(buffer, bounds))


class _Delayed:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        _pause()
        self._work.wait()

    def is_completed(self) -> bool:
        return False


def _pause() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.002, 0.005)))


class LateZeRO1(ZeRO1Strategy):
    """``zero1_custom`` whose parameters arrive late; counts those in flight after a step."""

    under_way = 0

    @override
    def _shard(self, optimizers: list[Optimizer]) -> None:
        super()._shard(optimizers)
        gatherer = self._engine.gatherer
        gatherer.collectives = LateCollectives(gatherer.collectives.group)
        finish_prompt = gatherer.finish_prompt

        def count() -> None:
            finish_prompt()
            self.under_way += sum(type(one) is InFlightParameter for one in self.lightning_module.parameters())

        gatherer.finish_prompt = count


class DelayedZeRO1(ZeRO1Strategy):
    """``zero1_custom`` on a wire that takes its time."""

    @override
    def _shard(self, optimizers: list[Optimizer]) -> None:
        super()._shard(optimizers)
        for mover in (self._engine.gatherer, self._engine.reducer.reductions):
            mover.collectives = DelayedCollectives(mover.collectives.group)


def late(**arguments: Any) -> LateZeRO1:
    return zero1(LateZeRO1, **arguments)


def delayed(**arguments: Any) -> DelayedZeRO1:
    return zero1(DelayedZeRO1, **arguments)
