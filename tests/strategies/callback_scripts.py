"""Modules, callbacks and scripts for the table of callbacks; none knows of the package under test."""

import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.strategies import zoo
from tests.strategies.parity import Recorder, whole


class Finetuned(zoo.MLP):
    """The optimizer starts with the head; the callback adds the backbone when it thaws it."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(zoo.FEATURES, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.head = nn.Linear(7, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.head(self.backbone(batch)) - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class SameOptimizer(zoo.MLP):
    """Returns the optimizer of its first training again, whose state goes on."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = [zoo.adamw(self.parameters())]
        return self.kept[0]


class WithoutOptimizer(zoo.MLP):
    def configure_optimizers(self) -> None:
        return None


class Tunable(zoo.MLP):
    """Has the attributes that finders look for."""

    def build(self) -> None:
        super().build()
        self.lr = 1e-3
        self.batch_size = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)

    def train_dataloader(self) -> Any:
        return zoo.loader(40, self.batch_size, torch.float64, dist.get_rank(), dist.get_world_size())


class KeepsOptimizer(zoo.MLP):
    """A copy or a pickle of the module has its optimizer and its scheduler, too."""

    def configure_optimizers(self) -> Any:
        self.opt = zoo.adamw(self.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 1, gamma=0.9)
        return [self.opt], [{"scheduler": self.scheduler, "interval": "step"}]


class OverflowsOnOneRank(zoo.MLP):
    """Every fourth gradient is too large on the last rank, so that all must skip the step."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        loss = super().compute_loss(batch)
        last = dist.get_rank() == dist.get_world_size() - 1
        return loss * 1e6 if self.training and last and self.trainer.global_step % 4 == 2 else loss


class Fails(zoo.MLP):
    """Raises ``error`` at ``where`` in the third batch, on all ranks, until it is mended."""

    where = ""
    error: type[BaseException] = KeyError

    def fail_in(self, where: str) -> None:
        if self.where == where and self.trainer.fit_loop.batch_idx == 2:
            raise self.error("on purpose")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.fail_in("training_step")
        loss = self.compute_loss(batch)
        # The first layer's gradient is the last to come: those of the others are on their way by then.
        self.net[0].bias.register_hook(lambda gradient: self.fail_in("backward"))
        return loss

    def on_after_backward(self) -> None:
        self.fail_in("on_after_backward")

    def configure_gradient_clipping(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        self.fail_in("configure_gradient_clipping")

    def configure_optimizers(self) -> Any:
        if self.where == "step":
            optimizer = FailsInStep(self.parameters(), lr=1e-2, eps=1e-4)
            optimizer.fail_in = self.fail_in
            return optimizer
        optimizer = zoo.adamw(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self.fail_in("after the step"))
        return optimizer


class FailsInStep(torch.optim.AdamW):
    fail_in: Callable[[str], None] = staticmethod(lambda where: None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.fail_in("step")
        super().step()
        return loss


class CopiesOnOneRank(Callback):
    """Keeps copies of the module in training, made in one of several ways, on rank 0 alone: none may be collective.

    Others keep what theirs would hold: of what is sharded they have the rest.
    """

    def __init__(self, make_copy: Callable[[LightningModule], LightningModule]) -> None:
        self.make_copy = make_copy
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            self.states.append(self.make_copy(pl_module).state_dict())
        else:
            self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def saved_and_loaded(module: LightningModule) -> LightningModule:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Watch(Recorder):
    """Keeps all there is to see, each time as a list of tensors."""

    def keep(self, *values: Any) -> None:
        self.parameters.append([whole(torch.as_tensor(value)).detach().double().clone() for value in values])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.keep(trainer.current_epoch, trainer.global_step, *rates, 1.0 if scaler is None else scaler.get_scale())

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.keep(*pl_module.state_dict().values())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.keep(*trainer.callback_metrics.values())


class Setting(NamedTuple):
    """What a script has at hand; each call of ``trainer`` gives a new one with new callbacks."""

    module: zoo.Zoo
    make_module: Callable[[], zoo.Zoo]
    trainer: Callable[..., Trainer]
    data: tuple[Any, Any]
    folder: Path


Script = Callable[[Setting], zoo.Zoo]


def fit(setting: Setting) -> zoo.Zoo:
    setting.trainer().fit(setting.module, *setting.data)
    return setting.module


def validate_then_fit(setting: Setting) -> zoo.Zoo:
    trainer = setting.trainer()
    trainer.validate(setting.module, setting.data[1], verbose=False)
    trainer.fit(setting.module, *setting.data)
    return setting.module


def fit_twice(setting: Setting) -> zoo.Zoo:
    return fit(setting) and fit(setting)


def fit_on_with_the_same_trainer(setting: Setting) -> zoo.Zoo:
    trainer = setting.trainer()
    trainer.fit(setting.module, *setting.data)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(setting.module, *setting.data)
    return setting.module


def fit_and_step(setting: Setting) -> zoo.Zoo:
    """The optimizer is an ordinary one when the training has ended."""
    optimizer = fit(setting).trainer.optimizers[0]
    for parameter in setting.module.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    for _ in range(2):
        optimizer.step()
    return setting.module


def resume_from(name: str, by_the_same_callbacks: bool = False) -> Script:
    def script(setting: Setting) -> zoo.Zoo:
        fit(setting)
        fresh = setting.make_module()
        trainer = setting.trainer(**({} if by_the_same_callbacks else {"callbacks": []}))
        trainer.fit(fresh, *setting.data, ckpt_path=str(setting.folder / name), weights_only=False)
        return fresh

    return script


def fail(setting: Setting, where: str, error: type[BaseException]) -> None:
    setting.module.where, setting.module.error = where, error
    handler = signal.getsignal(signal.SIGINT)
    # Lightning takes an interruption for the end of the process, and ignores any further one.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(setting)
    signal.signal(signal.SIGINT, handler)
    setting.module.where = ""


def fail_and_fit(where: str, error: type[BaseException]) -> Script:
    def script(setting: Setting) -> zoo.Zoo:
        fail(setting, where, error)
        trained = fit(setting)
        # After a failure parameters stay where they are: there may be no memory for copies.
        check_ordinary_storage(setting.module)
        return trained

    return script


def fail_and_resume(where: str, error: type[BaseException]) -> Script:
    def script(setting: Setting) -> zoo.Zoo:
        fail(setting, where, error)
        fresh = setting.make_module()
        trainer = setting.trainer(callbacks=[])
        trainer.fit(fresh, *setting.data, ckpt_path=str(setting.folder / "on_exception.ckpt"), weights_only=False)
        return fresh

    return script


def check_ordinary_storage(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor) or parameter.untyped_storage().nbytes() == parameter.nbytes


def callback_of(kind: type[Callback], trainer: Trainer) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


def losses_until_stopped(trainer: Trainer) -> list[Any]:
    losses = callback_of(LearningRateFinder, trainer).optimal_lr.results["loss"]
    assert len(losses) < 25
    return losses


def parameters_of_copies(trainer: Trainer) -> list[Any]:
    states = callback_of(CopiesOnOneRank, trainer).states
    return [whole(value) for state in states for value in state.values()]


def stopped_early(trainer: Trainer) -> list[Any]:
    assert trainer.current_epoch < trainer.max_epochs
    return [callback_of(EarlyStopping, trainer).stopped_epoch]
