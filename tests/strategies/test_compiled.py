"""Parameters of compiled parts go on arriving late, and nothing is compiled again for that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.torch_compat import call_before_compiling, stop_calling_before_compiling
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.late import late
from tests.strategies.odd import Blocks, CompiledBlocks, WrappedBlocks
from tests.strategies.parity import ddp, make_trainer


class InTheMiddle(Blocks):
    """Blocks are compiled when the training has gone on for a while."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            CompiledBlocks.compile_blocks(self)
        return super().training_step(batch, batch_idx)


class Function(Blocks):
    """A compiled function reads parameters of a module that is not compiled."""

    def build(self) -> None:
        super().build()
        self.penalty = torch.compile(lambda weights: sum(one.pow(2).sum() for one in weights), backend="eager")

    def compute_loss(self, batch: Tensor) -> Tensor:
        penalty = self.penalty([block.linear.weight for block in self.blocks])
        return super().compute_loss(batch) + 0.01 * penalty


class Trained(NamedTuple):
    """What a training has left: parameters, and after which steps something was compiled."""

    parameters: list[Tensor]
    compiled_after: list[int]


def trained(make: Callable[[], Any], strategy: Any) -> Trained:
    """Trains with nobody who reads parameters between two steps."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, compiled_after = make(), []

    def note(*_: object) -> None:
        compiled_after.append(module.trainer.global_step)

    call_before_compiling(note)
    try:
        ranks = dist.get_world_size()
        make_trainer(strategy).fit(module, zoo.loader(40 * ranks, 4, rank=dist.get_rank(), world_size=ranks))
    finally:
        stop_calling_before_compiling(note)
    return Trained([parameter.detach().clone() for parameter in module.parameters()], compiled_after)


def compare(make: Callable[[], Any]) -> tuple[float, int, int, list[int], list[int]]:
    strategy = late()
    ours, theirs = trained(make, strategy), trained(make, ddp())
    difference = distance(ours.parameters, theirs.parameters)
    return difference, strategy.under_way, strategy.under_way_last, ours.compiled_after, theirs.compiled_after


@pytest.mark.parametrize(
    "make",
    [CompiledBlocks, InTheMiddle, *(pytest.param(one, marks=pytest.mark.slow) for one in (Blocks, WrappedBlocks))],
)
def test_parameters_of_compiled_blocks_arrive_late_and_are_read_when_they_have(
    pool: RankPool, make: Callable[[], Any]
) -> None:
    for difference, under_way, last, ours, theirs in pool.run(2, compare, make):
        assert difference <= FP32
        assert under_way > 0 and last > 0
        assert ours == theirs


def test_parameters_that_compiled_functions_read_arrive_within_steps_soon(pool: RankPool) -> None:
    for difference, under_way, last, ours, theirs in pool.run(2, compare, Function):
        assert difference <= FP32
        assert under_way > 0 and last == 0
        # Once for ordinary parameters, and then while it was found out.
        assert len(ours) <= len(theirs) + 3
