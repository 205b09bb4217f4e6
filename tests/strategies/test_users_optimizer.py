"""The optimizer that ``configure_optimizers`` returned, in everything that a user does with it while it is trained."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_parstrat.distributed.engine.stepping import is_sharded
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP64
from tests.strategies.parity import by_flag, ddp, train, zero1


class Scheduled(zoo.MLP):
    """Schedulers from before the strategy sees the optimizer, and one from when it is trained."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.late = torch.optim.lr_scheduler.StepLR(self.trainer.optimizers[0], 3, gamma=0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        assert type(self.trainer.optimizers[0]) is self.trainer.optimizers[0].__class__ is torch.optim.Adam
        self.late.step()


def scheduled_as_under_ddp() -> None:
    expected, actual = (train(Scheduled, one(), validate=True) for one in (ddp, by_flag))
    assert is_sharded(actual.trainer.optimizers[0])
    # Of two ranks' gradients there is one sum: bit for bit.
    assert_same(actual.parameters, expected.parameters)
    assert_same(actual.losses, expected.losses)


def test_schedulers_find_the_user_s_optimizer(pool: RankPool) -> None:
    pool.run(2, scheduled_as_under_ddp)


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


class CompilesItsStep(zoo.MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        self.compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        return optimizer

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        self.compiled()


def compiled_step() -> None:
    expected, actual = (train(CompilesItsStep, one()) for one in (ddp, zero1))
    assert is_sharded(actual.trainer.optimizers[0])
    assert_same(actual.parameters, expected.parameters)


def test_a_step_within_a_compiled_function_is_sharded(pool: RankPool) -> None:
    pool.run(2, compiled_step)
