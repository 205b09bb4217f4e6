"""Hooks, callbacks and users see, and change, the gradients that DDP would show."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_parstrat.strategies.gradients.observers import observers_of_gradients
from tests.comparing import worst
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import Recorder, ddp, largest_difference, make_trainer, train, zero1

Seen = list[list[Tensor | None]]


def copies(module: LightningModule) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


class Watcher(Callback):
    """Looks wherever gradients can be seen."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(copies(pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen.append(copies(pl_module))

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen.append(copies(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(copies(pl_module))


def gradients_seen(module: type[zoo.Zoo], arguments: dict[str, Any]) -> tuple[Seen, Seen]:
    seen = []
    for strategy in (zero1(expose_gradients="auto"), ddp()):
        watcher = Watcher()
        train(lambda: module(), strategy, callbacks=[watcher], **arguments)
        seen.append(watcher.seen)
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("module", "arguments", "world_size"),
    [
        (zoo.MLP, {"gradient_clip_val": 0.05}, 2),
        (zoo.MLP, {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}, 3),
        (zoo.MLP, {"accumulate_grad_batches": 3}, 2),
        (zoo.MLP, {"fp16": True, "gradient_clip_val": 0.05}, 3),
        (zoo.UnusedBySomeRanks, {}, 2),
        (zoo.UnusedBySomeRanks, {}, 3),
        (zoo.Convolutional, {}, 3),
        (zoo.Adversarial, {}, 2),
    ],
)
def test_every_hook_sees_what_it_would_see_under_ddp(
    pool: RankPool, world_size: int, module: type[zoo.Zoo], arguments: dict[str, Any]
) -> None:
    for ours, theirs in pool.run(world_size, gradients_seen, module, arguments):
        # Of ten batches each is seen by two hooks at least, and each step by two more.
        steps = 10 if "accumulate_grad_batches" not in arguments else 4
        assert len(ours) == len(theirs) >= 20 + 2 * steps
        assert any(gradient is not None for gradients in ours for gradient in gradients)
        for one, other in zip(ours, theirs, strict=True):
            assert [gradient is None for gradient in one] == [gradient is None for gradient in other]
            # Relative to the whole gradient: a bias may be a sum that cancels, of terms rounded to half precision.
            pairs = [(g, reference) for g, reference in zip(one, other, strict=True) if g is not None]
            whole = sum(reference.square().sum() for _, reference in pairs) ** 0.5
            tolerance = 1e-2 if arguments.get("fp16") else 1e-4
            assert all((gradient - reference).norm() <= tolerance * whole for gradient, reference in pairs)


class Noisy(zoo.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for index, parameter in enumerate(self.parameters()):
            parameter.grad.add_(0.01 * (index + 1))


class Replacing(zoo.MLP):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.sign() * 0.1


class Dropping(zoo.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad = None
        self.net[2].bias.grad.zero_()


class TorchClipping(zoo.MLP):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class OwnClipping(zoo.MLP):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class OwnStep(zoo.MLP):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        norms = grad_norm(self, norm_type=2)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + float(norms["grad_2.0_norm_total"]))


class ManualAccumulation(zoo.MLP):
    """Zeroes by the module, accumulates over two batches, clips by hand."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.compute_loss(batch) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.zero_grad()
        return loss.detach()


class OwnZeroing(zoo.MLP):
    """A common idiom, which never asks the optimizer."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None


CHANGING = [OwnZeroing, Noisy, Replacing, Dropping, TorchClipping, OwnClipping, OwnStep, ManualAccumulation]


def compare_with_ddp(module: type[zoo.Zoo], expose: Any) -> float:
    actual = train(lambda: module(), zero1(expose_gradients=expose))
    return largest_difference(actual, train(lambda: module(), ddp()))


@pytest.mark.parametrize(
    ("module", "world_size"), [*((module, 2) for module in CHANGING), (Replacing, 1), (Dropping, 3), (OwnStep, 3)]
)
def test_what_a_user_does_to_gradients_is_what_steps(pool: RankPool, module: type[zoo.Zoo], world_size: int) -> None:
    assert worst(pool.run(world_size, compare_with_ddp, module, "auto")) <= 2e-5


def test_the_comparison_would_see_hidden_gradients(pool: RankPool) -> None:
    assert min(pool.run(2, compare_with_ddp, OwnClipping, False)) <= 2e-5
    with pytest.raises(AssertionError, match="NoneType"):
        pool.run(2, compare_with_ddp, Noisy, False)


class OnDemand(zoo.MLP):
    """Gradients are hidden; asked for, they can be read and changed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())
        with self.trainer.strategy.full_gradients():
            for index, parameter in enumerate(self.parameters()):
                parameter.grad.add_(0.01 * (index + 1))
        assert all(parameter.grad is None for parameter in self.parameters())


def on_demand() -> float:
    actual = train(lambda: OnDemand(), zero1(expose_gradients=False))
    return largest_difference(actual, train(lambda: Noisy(), ddp()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_gradients_shows_them_on_demand(pool: RankPool, world_size: int) -> None:
    assert worst(pool.run(world_size, on_demand)) <= 2e-5


class Averaging(Callback):
    """Keeps an average of the weights, which has nothing to do with gradients."""

    def __init__(self) -> None:
        self.average = AveragedModel(zoo.MLP().net)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.average.update_parameters(pl_module.net)


def gradients_after_backward(expose: Any, callbacks: list[Callback]) -> list[bool]:
    class Peek(zoo.MLP):
        visible: list[bool] = []  # noqa: RUF012  (made anew with the class in every call)

        def training_step(self, *args: Any) -> Any:
            # Before the gradients of the step before are zeroed; by a function that "auto" does not look into.
            self.visible.append(any(copy is not None for copy in copies(self)))
            return super().training_step(*args)

    torch.manual_seed(0)
    module = Peek()
    trainer = make_trainer(zero1(expose_gradients=expose), callbacks=callbacks)
    trainer.fit(module, zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size()))
    return module.visible[1:]


@pytest.mark.parametrize(
    ("expose", "callbacks", "visible"),
    [
        ("auto", [], False),
        (False, [Watcher()], False),
        (True, [], True),
        ("auto", [Watcher()], True),
        ("auto", [Averaging()], False),
    ],
)
def test_gradients_are_freed_unless_someone_may_look(
    pool: RankPool, expose: Any, callbacks: list[Callback], visible: bool
) -> None:
    assert pool.run(2, gradients_after_backward, expose, callbacks) == [[visible]] * 2


class Histograms(zoo.MLP):
    """Looks at gradients that the last step of the epoch has left, by way of another method."""

    def on_train_epoch_end(self) -> None:
        self.look()

    def look(self) -> None:
        self.norms = [parameter.grad.norm() for parameter in self.parameters()]


class Averages(zoo.MLP):
    """Does what most do there, which has nothing to do with gradients."""

    def on_train_epoch_end(self) -> None:
        self.zero_grad()
        self.norms = [parameter.norm() for parameter in self.parameters()]


class QuietCheckpoint(ModelCheckpoint):
    """A user's subclass that overrides nothing which runs while gradients exist."""

    def on_validation_end(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("module", "callbacks", "expected"),
    [
        (zoo.MLP, [LearningRateMonitor(), ModelCheckpoint(), QuietCheckpoint()], []),
        (zoo.MLP, [Recorder()], []),
        (
            zoo.MLP,
            [Watcher()],
            [
                "Watcher.on_after_backward",
                "Watcher.on_before_optimizer_step",
                "Watcher.on_before_zero_grad",
                "Watcher.on_train_batch_end",
            ],
        ),
        (zoo.MLP, [LambdaCallback(on_after_backward=print)], ["LambdaCallback.on_after_backward"]),
        (zoo.MLP, [Averaging()], []),
        (Noisy, [], ["Noisy.on_before_optimizer_step"]),
        (zoo.Adversarial, [], ["manual optimization"]),
        (Histograms, [], ["Histograms.on_train_epoch_end"]),
        (Averages, [], []),
    ],
)
def test_observers_are_named(module: type[zoo.Zoo], callbacks: list[Callback], expected: list[str]) -> None:
    assert observers_of_gradients(module(), callbacks, [], Precision()) == expected


def test_step_hooks_are_observers() -> None:
    module = zoo.MLP()
    optimizer = module.configure_optimizers()
    assert observers_of_gradients(module, [], [optimizer], Precision()) == []
    optimizer.register_step_pre_hook(lambda *_: None)
    assert observers_of_gradients(module, [], [optimizer], Precision()) == ["step hooks of AdamW"]


class OwnPrecision(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val / 2)


def clip_by_an_own_plugin() -> float:
    actual = train(lambda: zoo.MLP(), zero1(expose_gradients="auto"), gradient_clip_val=0.1, precision=OwnPrecision())
    return largest_difference(actual, train(lambda: zoo.MLP(), ddp(), gradient_clip_val=0.05))


def test_a_precision_plugin_that_clips_by_itself_is_respected(pool: RankPool) -> None:
    assert worst(pool.run(2, clip_by_an_own_plugin)) <= 2e-5


def watch_on_rank_zero() -> float:
    callbacks = [Watcher()] if dist.get_rank() == 0 else []
    actual = train(lambda: zoo.MLP(), zero1(expose_gradients="auto"), callbacks=callbacks)
    return largest_difference(actual, train(lambda: zoo.MLP(), ddp()))


def test_a_callback_on_one_rank_only_does_not_part_the_ranks(own_pool: RankPool) -> None:
    assert worst(own_pool.run(2, watch_on_rank_zero)) <= 2e-5
