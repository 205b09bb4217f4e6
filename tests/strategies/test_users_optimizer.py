"""The optimizer that ``configure_optimizers`` returned, in everything that a user does with it while it is trained."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_parstrat.distributed.engine.stepping import is_sharded
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP64
from tests.strategies.parity import Run, by_flag, ddp, train, zero1

HOOKS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]


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
        self.late.step()


class LooksEverywhere(Callback):
    """Has every hook, and looks at the optimizers in it."""

    def __init__(self) -> None:
        self.seen: dict[str, set[type]] = {}

    def look(self, name: str, trainer: Trainer) -> None:
        classes = {type(optimizer) for optimizer in trainer.optimizers}
        self.seen.setdefault(name, set()).update(classes | {optimizer.__class__ for optimizer in trainer.optimizers})


def _hook(name: str) -> Callable[..., None]:
    return lambda self, trainer, *_, **__: self.look(name, trainer)


for _name in HOOKS:
    setattr(LooksEverywhere, _name, _hook(_name))


def seen_in_hooks(strategy: Callable[[], Any]) -> tuple[Run, LooksEverywhere]:
    callback = LooksEverywhere()
    run = train(Scheduled, strategy(), callbacks=[callback], validate=True)
    return run, callback


def class_in_every_hook(strategy: Callable[[], Any]) -> None:
    expected, theirs = seen_in_hooks(ddp)
    actual, ours = seen_in_hooks(strategy)
    assert is_sharded(actual.trainer.optimizers[0])
    assert ours.seen == theirs.seen and len(ours.seen) > 20
    assert set.union(*ours.seen.values()) == {torch.optim.Adam}
    # Of two ranks' gradients there is one sum: bit for bit.
    assert_same(actual.parameters, expected.parameters)
    assert_same(actual.losses, expected.losses)


def test_the_class_is_the_user_s_in_every_hook(pool: RankPool) -> None:
    pool.run(2, class_in_every_hook, by_flag)


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
