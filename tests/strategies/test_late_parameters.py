"""Parameters that arrive after the step are never read before they have; the table of cases has most of that."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.torch_compat import call_before_compiling
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.late import late
from tests.strategies.odd import Blocks, CompiledBlocks
from tests.strategies.parity import ddp, make_trainer

# Compiled parts: parameters go on arriving late, and nothing is compiled again for that.


class Function(Blocks):
    """A compiled function reads parameters of a module that is not compiled."""

    def build(self) -> None:
        super().build()
        self.penalty = torch.compile(lambda weights: sum(one.pow(2).sum() for one in weights), backend="eager")

    def compute_loss(self, batch: Tensor) -> Tensor:
        penalty = self.penalty([block.linear.weight for block in self.blocks])
        return super().compute_loss(batch) + 0.01 * penalty


def trained(make: Callable[[], Any], strategy: Any) -> tuple[list[Tensor], list[int]]:
    """Parameters at the end, and after which steps something was compiled. No code reads parameters between steps."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, compiled_after = make(), []

    def note(*_: object) -> None:
        compiled_after.append(module.trainer.global_step)

    stop = call_before_compiling(note)
    try:
        ranks = dist.get_world_size()
        make_trainer(strategy).fit(module, zoo.loader(40 * ranks, 4, rank=dist.get_rank(), world_size=ranks))
    finally:
        stop()
    return [parameter.detach().clone() for parameter in module.parameters()], compiled_after


def compare(make: Callable[[], Any]) -> tuple[float, int, int, list[int], list[int]]:
    strategy = late()
    (ours, compiled), (theirs, expected) = trained(make, strategy), trained(make, ddp())
    return distance(ours, theirs), strategy.under_way, strategy.under_way_last, compiled, expected


def test_parameters_of_compiled_blocks_arrive_late_and_are_read_when_they_have(pool: RankPool) -> None:
    for difference, under_way, last, ours, theirs in pool.run(2, compare, CompiledBlocks):
        assert difference <= FP32
        assert under_way > 0 and last > 0
        assert ours == theirs


def test_parameters_that_compiled_functions_read_arrive_within_steps_soon(pool: RankPool) -> None:
    for difference, under_way, last, ours, theirs in pool.run(2, compare, Function):
        assert difference <= FP32
        assert under_way > 0 and last == 0
        # Once for ordinary parameters, and then while it was found out.
        assert len(ours) <= len(theirs) + 3
