"""Gradients stay hidden after the step only from hooks of which it is known that they leave them alone."""

import functools
import operator
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm as norm_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_parstrat.strategies.gradients.code_reading import may_read_gradients
from tests.strategies import zoo
from tests.strategies.gradients import looking

Hook = Callable[..., Any]


class NormMetric(torchmetrics.Metric):
    def update(self, module: nn.Module) -> None:
        self.norms = looking.norms(module)

    def compute(self) -> Any:
        return self.norms


class Owner(Callback):
    """Has what hooks below use."""

    def __init__(self) -> None:
        self.average = AveragedModel(nn.Linear(1, 1))
        self.own_average = looking.Average()
        self.looker = looking.Looker()
        self.lookers = {"first": [looking.norms]}
        self.measure = functools.partial(norm_of, norm_type=2)
        self.total = norm_of
        self.metric = NormMetric()
        self.listeners: list[Any] = []
        self.count = 0
        self.later: Any = None

    def on_train_epoch_start(self, *_: Any) -> None:
        self.later = looking.Looker()

    def look(self, module: Any) -> Any:
        return module.weight.grad

    @property
    def norm(self) -> Any:
        return self.look(self)

    @functools.cached_property
    def kept_norm(self) -> Any:
        return self.look(self)


# Each as `on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)` of a callback.
def averages(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    if trainer.global_step % 2 == 0:
        self.average.update_parameters(pl_module)


def logs(self: Any, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
    self.count += 1
    loss = float(outputs["loss"].detach().item())
    pl_module.log("gradient free", loss, prog_bar=trainer.is_global_zero)
    print(f"{self.count}: {loss:.3f}", trainer.current_epoch)


def reads_by_an_average_of_its_own(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.own_average.update(pl_module)


def reads_by_another_name(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print(norm_of(pl_module, 2))


def reads_by_a_kept_function(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.total(pl_module, 2)


def reads_by_a_metric(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.metric(pl_module)


def reads_by_what_listens(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    for listener in self.listeners:
        listener(pl_module)


def saves(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    trainer.save_checkpoint("on_save_checkpoint may look.ckpt")


def reads(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print([parameter.grad for parameter in pl_module.parameters()])


def drops(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    for parameter in pl_module.parameters():
        parameter.grad = None


def zeroes(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.zero_grad()


def reads_in_another_module(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    looking.norms(pl_module)


def reads_by_import(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    from tests.strategies.gradients.looking import norms

    norms(pl_module)


def reads_by_relative_import(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    from .looking import norms

    norms(pl_module)


def reads_by_a_method(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.look(pl_module)


def reads_by_a_property(self: Any, *_: Any) -> None:
    print(self.norm)


def reads_by_a_cached_property(self: Any, *_: Any) -> None:
    print(self.kept_norm)


def reads_by_an_object(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.looker.update(pl_module)


def reads_by_an_operator(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print(self.looker[pl_module])


def reads_by_a_container(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.lookers["first"][0](pl_module)


def reads_by_a_registry(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    looking.TOOLS["looker"].update(pl_module)


def reads_by_a_partial(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.measure(pl_module)


def reads_by_what_is_set_later(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    self.later.update(pl_module)


def reads_by_what_is_made_here(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    looking.Looker().update(pl_module)


def reads_by_an_inner_function(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.apply(lambda module: [p.grad for p in module.parameters()])


def reads_by_a_neighbour(self: Any, trainer: Any, *_: Any) -> None:
    for callback in trainer.callbacks:
        callback.count_all()


def reads_by_text(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print([getattr(parameter, "grad") for parameter in pl_module.parameters()])  # noqa: B009  (as users do)


def reads_by_getter(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print(list(map(operator.attrgetter("grad"), pl_module.parameters())))


def reads_by_eval(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    print(eval("pl_module.weight.grad"))


def clips(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


def calls_a_stranger(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    trainer.a_tool_of_mine.run(pl_module)


def calls_what_is_nowhere(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    a_name_that_is_nowhere(pl_module)  # type: ignore[name-defined]  # noqa: F821


def visits_all_modules(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
    for module in pl_module.modules():
        module.update()


def decorated(hook: Hook) -> Hook:
    @functools.wraps(hook)
    def watched(self: Any, trainer: Any, pl_module: Any, *rest: Any) -> Any:
        looking.norms(pl_module)
        return hook(self, trainer, pl_module, *rest)

    return watched


def decorated_without_a_word(hook: Hook) -> Hook:
    return lambda *arguments: hook(*arguments)


def as_method(hook: Hook) -> tuple[Any, Owner]:
    owner = type("Owned", (Owner,), {"on_train_batch_end": hook})()
    return owner.on_train_batch_end, owner


HIDDEN: dict[str, Hook] = {
    **{one.__name__: one for one in (averages, logs)},
    "averages, decorated by torch": torch.no_grad()(averages),
}
EXPOSED: dict[str, Hook] = {
    **{
        name: hook
        for name, hook in list(globals().items())
        if name.startswith(("reads", "calls", "drops", "zeroes", "clips", "visits", "saves"))
    },
    "reads, decorated by torch": torch.no_grad()(reads),
    "averages, decorated": decorated_without_a_word(averages),
    "decorated by what reads": decorated(averages),
    "a partial": functools.partial(averages, None),
    "a cache": functools.lru_cache(averages),
    "a builtin": print,
    "compiled by no one knows whom": Mock(),
    "an object": type("Calls", (), {"__call__": averages})(),
}


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        *(pytest.param(hook, False, id=name) for name, hook in HIDDEN.items()),
        *(pytest.param(hook, True, id=name) for name, hook in EXPOSED.items()),
    ],
)
def test_what_a_hook_does_decides(hook: Hook, expected: bool) -> None:
    method, owner = as_method(hook) if hasattr(hook, "__get__") else (hook, Owner())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[owner], **quiet)
    assert may_read_gradients(method, owner, (zoo.MLP(), trainer)) is expected


class LogsItsOwnWay(zoo.MLP):
    def log(self, *arguments: Any, **keywords: Any) -> None:
        looking.norms(self)


class KeepsAverage(zoo.MLP):
    """As modules do that keep an average of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(zoo.MLP())

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self)


class ReadsFirst(zoo.MLP):
    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        looking.norms(self)


class KeepsAndReads(KeepsAverage, ReadsFirst):
    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)


@pytest.mark.parametrize(("kind", "expected"), [(KeepsAverage, False), (ReadsFirst, True), (KeepsAndReads, True)])
def test_hooks_of_a_module_and_of_its_bases(kind: type[LightningModule], expected: bool) -> None:
    module = kind()
    assert may_read_gradients(module.on_before_zero_grad, module, (module,)) is expected


def test_a_module_whose_log_is_its_own() -> None:
    method, owner = as_method(logs)
    assert may_read_gradients(method, owner, (LogsItsOwnWay(),))


class StepsByEpoch(zoo.MLP):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class OwnRate(LRScheduler):
    def get_lr(self) -> list[Any]:
        return [group["params"][0].grad.norm() for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda optimizer: StepLR(optimizer, 1), False),
        (lambda optimizer: LambdaLR(optimizer, lambda _: 1.0 / len(looking.norms(zoo.MLP()))), True),
        (looking.InEpochs, True),
        (OwnRate, True),
    ],
)
def test_schedulers_are_a_librarys(schedule: Any, expected: bool) -> None:
    module = StepsByEpoch()
    optimizer = module.configure_optimizers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert may_read_gradients(module.lr_scheduler_step, module, (module,), [schedule(optimizer)]) is expected


def test_a_callback_of_functions() -> None:
    callback = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: looking.norms(module))
    assert may_read_gradients(callback.on_train_batch_end, callback)
    callback = LambdaCallback(on_train_batch_end=lambda trainer, *_: print(trainer.global_step))
    assert not may_read_gradients(callback.on_train_batch_end, callback)
