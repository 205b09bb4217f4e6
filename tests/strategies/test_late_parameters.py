"""Parameters that arrive after the step are never read before they have; the table of cases has most of that."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import delayed, late
from tests.strategies.parity import ddp, make_trainer, train, zero1


def fifty_steps(strategy: Any) -> list[list[Tensor]]:
    run = train(
        lambda: zoo.Attention(), strategy, max_epochs=5, accumulate_grad_batches=1, gradient_clip_val=0.1, validate=True
    )
    return run.parameters


def differences_of_delays(world_size: int) -> int:
    prompt = fifty_steps(zero1(overlap_param_gather=False))
    slow = fifty_steps(delayed())
    assert len(prompt) == len(slow) == 50
    return sum(
        not torch.equal(one, other)
        for ours, theirs in zip(prompt, slow, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_overlap_changes_no_bit_whatever_the_wire_does(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, differences_of_delays, world_size) == [0] * world_size


class FailsInForward(zoo.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def what_is_left_after_a_failure() -> tuple[bool, list[str], int]:
    strategy = late()
    module = FailsInForward()
    with pytest.raises(ZeroDivisionError):
        make_trainer(strategy).fit(module, zoo.loader(40, 4))
    finite = all(not parameter.isnan().any() for parameter in module.parameters())
    return finite, sorted({type(parameter).__name__ for parameter in module.parameters()}), strategy.under_way


def test_a_failure_before_the_next_forward_leaves_whole_parameters(pool: RankPool) -> None:
    for finite, classes, under_way in pool.run(2, what_is_left_after_a_failure):
        assert finite and classes == ["Parameter"] and under_way > 0


class BackwardOfAnEarlierForward(zoo.MLP):
    """Steps between a forward and its backward, which torch refuses: the graph has saved what is no more."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.refused = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        earlier, loss = super().training_step(batch, batch_idx), super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        try:
            earlier.backward()
        except RuntimeError as error:
            self.refused += "modified by an inplace operation" in str(error)
        optimizer.zero_grad()
        return loss.detach()


def refusals(strategy: Any) -> int:
    return train(lambda: BackwardOfAnEarlierForward(), strategy).module.refused


def refusals_of_both() -> tuple[int, int]:
    return refusals(late()), refusals(ddp())


def test_a_graph_of_before_the_step_is_refused_while_parameters_are_on_their_way(pool: RankPool) -> None:
    assert pool.run(2, refusals_of_both) == [(10, 10), (10, 10)]
