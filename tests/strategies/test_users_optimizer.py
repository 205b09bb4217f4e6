"""The optimizer that ``configure_optimizers`` returned, in everything that a user does with it while it is trained."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP64
from tests.strategies.parity import by_flag, ddp, train, zero1


class ByWrapper(zoo.MLP):
    """Manual optimization that asks everything of what ``self.optimizers()`` returns."""

    automatic_optimization = False

    def build(self) -> None:
        super().build()
        self.late = nn.Parameter(torch.ones(1))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch * self.late)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Adam) and type(optimizer.optimizer) is torch.optim.Adam
        if batch_idx == 2:
            optimizer.add_param_group({"params": [self.late], "lr": 0.05})
        # Gradients of two batches, so that those which were not zeroed would show.
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=batch_idx % 4 == 0)
        loss = self.compute_loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.states.append(copy.deepcopy(optimizer.state_dict()))
        if batch_idx == 6:
            # What is there already: Lightning's wrapper by itself loads it for nobody to see.
            optimizer.load_state_dict(optimizer.state_dict())
        return loss.detach()

    def on_train_start(self) -> None:
        self.states: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2, eps=1e-4)


class ReturnsAWrapper(ByWrapper):
    def configure_optimizers(self) -> Any:
        return LightningOptimizer(super().configure_optimizers())


def by_wrapper(make: type[ByWrapper], strategy: Callable[[], Any]) -> None:
    # What accumulates over reductions is rounded otherwise.
    expected, actual = (train(make, one(), precision="64-true") for one in (ddp, strategy))
    assert_same(actual.parameters, expected.parameters, rtol=FP64, atol=FP64)
    assert type(actual.trainer.optimizers[0]).__name__ == type(expected.trainer.optimizers[0]).__name__
    assert_same(actual.module.states, expected.module.states, rtol=FP64, atol=FP64)
    # When its training is over, too.
    wrapper = actual.trainer.strategy._lightning_optimizers[0]
    assert_same(wrapper.state_dict(), actual.module.states[-1])


def test_lightning_s_wrapper_does_what_the_optimizer_does(pool: RankPool) -> None:
    for make, strategy in ((ByWrapper, by_flag), (ReturnsAWrapper, zero1)):
        pool.run(2, by_wrapper, make, strategy)
