"""Hooks and callbacks see, and change, the gradients that DDP would show."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_parstrat.strategies.gradients.observers import observers_of_gradients
from tests.comparing import worst
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.parity import Recorder, ddp, largest_difference, make_trainer, train, zero1


class LooksAfterTheStep(Callback):
    def __init__(self) -> None:
        self.seen: list[list[Tensor | None]] = []

    def look(self, module: LightningModule) -> None:
        self.seen.append([None if p.grad is None else p.grad.detach().clone() for p in module.parameters()])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.look(pl_module)


class Watcher(LooksAfterTheStep):
    """Looks in all hooks that can see gradients."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.look(pl_module)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.look(pl_module)


class Noisy(zoo.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for index, parameter in enumerate(self.parameters()):
            parameter.grad.add_(0.01 * (index + 1))


class Replaces(zoo.MLP):
    """Replaces gradients, drops one and clears one."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.sign() * 0.1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad = None
        self.net[2].bias.grad.zero_()


class Decays(zoo.MLP):
    """Changes gradients in place by parameters, without `torch.no_grad()`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(parameter, alpha=0.1)


class OwnStep(zoo.MLP):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        norms = grad_norm(self, norm_type=2)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + float(norms["grad_2.0_norm_total"]))


class ByGradientLastSeen(zoo.MLP):
    """Scales the next loss by gradients that the step has left, which it finds by way of another method."""

    factor = 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.factor = self.look()

    def look(self) -> float:
        return 1.0 / (1.0 + float(self.net[0].weight.grad.norm()))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) * self.factor


class OnDemand(zoo.MLP):
    """Gradients are hidden; within ``full_gradients`` they can be read and changed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())
        with self.trainer.strategy.full_gradients():
            for index, parameter in enumerate(self.parameters()):
                parameter.grad.add_(0.01 * (index + 1))
        assert all(parameter.grad is None for parameter in self.parameters())


class InTheMiddle(zoo.MLP):
    """Changes what has accumulated, where it can be seen, after each micro-batch."""

    def on_after_backward(self) -> None:
        with getattr(self.trainer.strategy, "full_gradients", nullcontext)():
            for parameter in self.parameters():
                parameter.grad.mul_(-0.5)


class Row(NamedTuple):
    """A training that somebody looks into, or changes.

    Attributes:
        module: The module.
        watch: Makes the callback that looks, if there is one.
        ranks: How many.
        arguments: The Trainer's.
        tolerance: Of parameters; and of gradients, relative to the whole gradient: a bias may be a sum that cancels.
        reference: The module under DDP, which needs no gradients to be exposed. By default gradients are.
        strategy: Its arguments.
    """

    module: type[zoo.Zoo]
    watch: Callable[[], Any] = lambda: None
    ranks: int = 2
    arguments: dict[str, Any] = {}  # noqa: RUF012
    tolerance: tuple[float, float] = (2e-5, 1e-4)
    reference: type[zoo.Zoo] | None = None
    strategy: dict[str, Any] = {}  # noqa: RUF012


ROWS = {
    "clipped by norm": Row(zoo.MLP, Watcher, 2, {"gradient_clip_val": 0.05}),
    "clipped by value": Row(zoo.MLP, Watcher, 3, {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}),
    "accumulated": Row(zoo.MLP, Watcher, 2, {"accumulate_grad_batches": 3}),
    "scaled": Row(zoo.MLP, Watcher, 3, {"fp16": True, "gradient_clip_val": 0.05}, (1e-3, 1e-2)),
    "unused": Row(zoo.UnusedBySomeRanks, Watcher, 3),
    "by hand": Row(zoo.Adversarial, Watcher),
    "on one rank": Row(zoo.MLP, lambda: Watcher() if dist.get_rank() == 0 else None),
    **{module.__name__: Row(module) for module in (Noisy, Decays, OwnStep, ByGradientLastSeen)},
    "Replaces": Row(Replaces, ranks=3),
    "on demand": Row(OnDemand, reference=Noisy),
    "on demand, one rank": Row(OnDemand, ranks=1, reference=Noisy),
    "on demand, in windows": Row(
        InTheMiddle,
        arguments={"accumulate_grad_batches": 3},
        reference=InTheMiddle,
        strategy={"shard_gradients": True},
    ),
}


def beside_ddp(name: str) -> tuple[float, float]:
    """How far parameters, and gradients that were seen, are from those under DDP."""
    row, runs, seen = ROWS[name], [], []
    ours = zero1(expose_gradients="auto" if row.reference is None else False, **row.strategy)
    for module, strategy in ((row.module, ours), (row.reference or row.module, ddp())):
        watchers = [watcher for watcher in [row.watch()] if watcher is not None]
        runs.append(train(module, strategy, callbacks=watchers, **row.arguments))
        seen.append([gradients for watcher in watchers for gradients in watcher.seen])
        # Of ten batches or three windows and a short one.
        assert len(seen[-1]) >= 10 * len(watchers)
    apart = [0.0]
    for one, other in zip(*seen, strict=True):
        assert [gradient is None for gradient in one] == [gradient is None for gradient in other]
        pairs = [(g, reference) for g, reference in zip(one, other, strict=True) if g is not None]
        whole = sum(reference.square().sum() for _, reference in pairs) ** 0.5
        apart += [float((gradient - reference).norm() / whole) for gradient, reference in pairs]
    return largest_difference(*runs), worst(apart)


QUICK = (
    "Decays",
    "clipped by norm",
    "accumulated",
    "unused",
    "by hand",
    "OwnStep",
    "Replaces",
    "on demand",
    "on one rank",
)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ROWS))
def test_what_a_user_sees_and_does_is_as_under_ddp(pool: RankPool, name: str) -> None:
    row = ROWS[name]
    for apart in pool.run(row.ranks, beside_ddp, name):
        assert all(one <= tolerance for one, tolerance in zip(apart, row.tolerance, strict=True))


class Averaging(Callback):
    """Keeps an average of the weights, which has nothing to do with gradients."""

    def __init__(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(zoo.MLP().net)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.average.update_parameters(pl_module.net)


def are_visible_later(expose: Any, callbacks: list[Callback]) -> list[bool]:
    visible: list[bool] = []

    class Peek(zoo.MLP):
        def training_step(self, *args: Any) -> Any:
            # Before the gradients of the step before are zeroed; by a name that "auto" does not know.
            visible.append(any(getattr(parameter, "gr" + "ad") is not None for parameter in self.parameters()))
            return super().training_step(*args)

    trainer = make_trainer(zero1(expose_gradients=expose), callbacks=callbacks)
    trainer.fit(Peek(), zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size()))
    return visible[1:]


def all_visible() -> list[list[bool]]:
    return [
        are_visible_later(expose, callbacks)
        for expose, callbacks in (
            ("auto", []),
            (False, [Watcher()]),
            ("auto", [Averaging()]),
            (True, []),
            ("auto", [LooksAfterTheStep()]),
        )
    ]


def test_gradients_are_freed_unless_someone_may_look(pool: RankPool) -> None:
    assert pool.run(2, all_visible) == [[[False]] * 3 + [[True]] * 2] * 2


class Averages(zoo.MLP):
    """Does what most do there, which has nothing to do with gradients."""

    def on_train_epoch_end(self) -> None:
        self.zero_grad()
        self.norms = [parameter.norm() for parameter in self.parameters()]


class Looks:
    def __call__(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen = [parameter.grad for parameter in pl_module.parameters()]


class OwnPrecision(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val / 2)


def test_observers_are_named() -> None:
    hooks = ("look", "on_after_backward", "on_before_optimizer_step")
    for module, callbacks, expected in (
        (zoo.MLP, [LearningRateMonitor(), ModelCheckpoint(), Recorder(), Averaging()], []),
        (zoo.MLP, [Watcher()], [f"Watcher.{hook}" for hook in hooks]),
        (zoo.MLP, [LambdaCallback(on_after_backward=print)], ["LambdaCallback.on_after_backward"]),
        (zoo.MLP, [LambdaCallback(on_after_backward=partial(print, 1))], ["LambdaCallback.on_after_backward"]),
        (zoo.MLP, [LambdaCallback(on_train_batch_end=Looks())], ["LambdaCallback.on_train_batch_end"]),
        (Noisy, [], ["Noisy.on_before_optimizer_step"]),
        (zoo.Adversarial, [], ["manual optimization"]),
        (Averages, [], []),
        (ByGradientLastSeen, [], ["ByGradientLastSeen.look"]),
    ):
        assert observers_of_gradients(module(), callbacks, [], Precision()) == expected
    module = zoo.MLP()
    assert observers_of_gradients(module, [], [], OwnPrecision()) == ["OwnPrecision.clip_grad_by_norm"]
    optimizer = module.configure_optimizers()
    assert observers_of_gradients(module, [], [optimizer], Precision()) == []
    optimizer.register_step_pre_hook(lambda *_: None)
    assert observers_of_gradients(module, [], [optimizer], Precision()) == ["step hooks of AdamW"]
