"""A step is that of one big batch in float64, clipped by torch: a table of trainings, in every strategy."""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_parstrat.distributed.gradients.loss_weights import LossWeights, _HostCopy
from lightning_parstrat.errors import InconsistentWeightsError
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import (
    Poisoned,
    Regression,
    Sample,
    adamw,
    every,
    flat,
    fused,
    sgd,
    train_on_big_batches,
    windows_of,
)
from tests.strategies.gradients.trainings import KINDS, WEIGHTS, by_pairs, ranks_batches, strategy
from tests.strategies.parity import make_trainer, whole
from tests.strategies.zoo import Stream

Windows = Sequence[Sequence[int]]


class Row(NamedTuple):
    """A training whose every step is that of one big batch.

    Attributes:
        trainer: The Trainer's arguments; a function where they are made anew for every training.
        module: Makes the module.
        strategy: The strategy's arguments.
        ranks: How many.
        batches: Of each rank.
        weights: Of the micro-batches; they repeat.
        windows: The batches of each step; by default whole windows, and a shorter one at the end of each epoch.
        poisoned: Batches of which one rank's gradients are not finite: the truth leaves out their windows.
        truth: Arguments of the truth, beside those of clipping.
        loader: Makes the loader of a rank's batches.
        skipped: How many steps are left out, each with a warning of rank 0.
        norm: ``"known"`` if the strategy knows that of the big batch, as it does if the Trainer clips by it;
            ``"another"`` if it was last measured at another time; by default it is not measured.
    """

    trainer: dict[str, Any] | Callable[[], dict[str, Any]]
    module: Callable[[], LightningModule] = Regression
    strategy: dict[str, Any] = {}  # noqa: RUF012
    ranks: int = 2
    batches: int = 8
    weights: tuple[float, ...] = (1.0,)
    windows: Windows | None = None
    poisoned: tuple[int, ...] = ()
    truth: dict[str, Any] = {}  # noqa: RUF012
    loader: Callable[[Sequence[Sample]], DataLoader[Any]] = big_batch.loader
    skipped: int = 0
    norm: str = ""


class Steps(Regression):
    """Returns None for a loss, or ends the first epoch, at given batches. They are counted over epochs."""

    def __init__(self, none_at: tuple[int, ...] = (), ends_at: int = -1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.none_at, self.ends_at, self.count = none_at, ends_at, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == self.ends_at and self.current_epoch == 0 else None

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.count += 1
        return None if self.count - 1 in self.none_at else super().training_step(batch, batch_idx)


class Validated(Regression):
    def val_dataloader(self) -> Any:
        return big_batch.loader(big_batch.samples(2))

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        nn.functional.mse_loss(self.network(batch.inputs), batch.targets)


class Weighed(Regression):
    """Callbacks see the loss as the module returned it."""

    def __init__(self) -> None:
        super().__init__(weighted=True)

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=False)
        weight = torch.tensor(batch.weight, requires_grad=True) * 1 if batch_idx % 2 else batch.weight
        return {"loss": loss, "loss_weight": weight, "extra": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end()
        # Lightning divides it by the window's length.
        shown = float(outputs["loss"]) * self.trainer.accumulate_grad_batches
        assert shown == pytest.approx(float(self.trainer.callback_metrics["loss"]))
        assert outputs["extra"] == batch_idx


Weighed.on_train_batch_end.__module__ = "lightning.pytorch.core.module"


def classified(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.argmax(1))


class Ignoring(Regression):
    """All targets of a micro-batch without weight are ignored: its loss is 0 / 0, its gradients are zeros."""

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        targets = batch.targets.argmax(1).masked_fill(torch.tensor(batch.weight == 0), -100)
        loss = nn.functional.cross_entropy(self.network(batch.inputs), targets)
        assert loss.isnan() == (batch.weight == 0)
        return {"loss": loss, "loss_weight": batch.weight}


class Divides(Regression):
    """Takes the mean over what is not padding by hand: 0 / 0 where all is."""

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * batch.weight / torch.tensor(batch.weight)
        return {"loss": loss, "loss_weight": batch.weight}


class ZeroesInPlace(Regression):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class TrainsMore(Regression):
    """Has a parameter that no optimizer zeroes, nor steps."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["params"] = [*self.network.parameters()]
        return optimizer

    def on_train_start(self) -> None:
        self.network.register_forward_hook(lambda module, inputs, output: output * self.scale)


class Keeps(Regression):
    """Zeroes gradients before the first step alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx == 0:
            optimizer.zero_grad()


class StepsByTheLoss(torch.optim.SGD):
    """Needs the loss to step, the mean over ranks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.1 * float(closure())
        super().step()


plain_sgd = partial(torch.optim.SGD, lr=0.5)


class Looks(Regression):
    """Without momentum a step is the gradient; hooks see that of the big batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(plain_sgd, **arguments)
        self.after_backward: Tensor = torch.empty(0)
        self.before_step: list[Tensor] = []

    def gradient(self) -> Tensor:
        return torch.cat([whole(parameter.grad).reshape(-1) for parameter in self.parameters()]).clone()

    def on_after_backward(self) -> None:
        self.after_backward = self.gradient()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self.gradient())
        assert torch.equal(self.before_step[-1], self.after_backward)

    def on_train_end(self) -> None:
        steps = zip([flat(big_batch.network()), *self.seen], self.seen, strict=False)
        assert distance(self.before_step, [(before - after) / 0.5 for before, after in steps]) <= 2e-6


class ByTheModule(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


class ByTorch(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.2)


class HalvesFirst(Regression):
    """Works on exposed gradients and on hidden ones; half of them is mostly less than the limit."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        with getattr(self.trainer.strategy, "full_gradients", torch.no_grad)():
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


class ClipsBeforeSteps(torch.optim.SGD):
    """The truth's optimizer: does to gradients first what a user's hook does."""

    def __init__(self, clip: Callable[[list[Tensor]], Any], parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.5)
        self.clip = clip

    def step(self, closure: Any = None) -> Any:
        self.clip(self.param_groups[0]["params"])
        return super().step(closure)


def truly_halved(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)
    clip_grad_norm_(parameters, 0.2)


def clipped_before(clip: Callable[[list[Tensor]], Any]) -> dict[str, Any]:
    return {"optimizer": partial(ClipsBeforeSteps, clip)}


NORM: dict[str, Any] = {"gradient_clip_val": 0.2}
VALUE: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
BY_3: dict[str, Any] = {"accumulate_grad_batches": 3}


def poisoned(
    at: tuple[int, ...], trainer: dict[str, Any], value: float = math.nan, optimizer: Callable[..., Any] = sgd
) -> Row:
    module, truth = partial(Poisoned, at, value=value, optimizer=optimizer), {"optimizer": optimizer}
    arguments = {"batches": 7, "poisoned": at, "skipped": len(at), "truth": truth, "norm": "known"}
    return Row(trainer, module, {"nonfinite_grads": "skip"}, **arguments)


NOTHING = (1.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 3.0)
"""On two ranks, of which the second begins with the next one, nothing weighs in the batches 3 to 5."""
WHOLE: Windows = [[0, 1, 2], [3, 4, 5], [6, 7]]
WEIGHTED = partial(Regression, weighted=True)
ROWS: dict[str, Row] = {
    "alone, short windows": Row({**BY_3, **NORM, "max_epochs": 2}, ranks=1),
    "three ranks": Row({**BY_3, **NORM, "max_epochs": 2}, ranks=3),
    "the last alone": Row({"accumulate_grad_batches": 4}, batches=9),
    "weights alone": Row({**BY_3, **NORM, "max_epochs": 2}, WEIGHTED, ranks=1, weights=WEIGHTS),
    "weights": Row({**BY_3, **NORM, "max_epochs": 2}, Weighed, weights=WEIGHTS),
    "weights, three ranks": Row({"accumulate_grad_batches": 4, **VALUE}, WEIGHTED, ranks=3, batches=9, weights=WEIGHTS),
    "no weight": Row({**BY_3, **NORM}, WEIGHTED, weights=NOTHING, skipped=1),
    "scheduler": Row(
        lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 2: 5})], "max_epochs": 3},
        windows=[*[[i] for i in range(8)], *WHOLE, [0, 1, 2, 3, 4], [5, 6, 7]],
    ),
    "limit": Row({**BY_3, "limit_train_batches": 5}, windows=[[0, 1, 2], [3, 4]]),
    "unknown length": Row(
        {**BY_3, "max_epochs": 2},
        windows=WHOLE * 2,
        loader=lambda batches: DataLoader(Stream(batches), batch_size=None),
    ),
    "max steps": Row({**BY_3, "max_steps": 4, "max_epochs": -1}, windows=[*WHOLE, [0, 1, 2]]),
    "epoch ended": Row({**BY_3, "max_epochs": 2}, partial(Steps, ends_at=4), windows=[[0, 1, 2], *WHOLE]),
    "validation inside": Row({**BY_3, "val_check_interval": 2, "max_epochs": 2, "num_sanity_val_steps": 0}, Validated),
    "norm 1": Row({"gradient_clip_val": 0.03}, strategy={"norm_type": 1}),
    "largest element": Row({**BY_3, "gradient_clip_val": 0.03}, strategy={"norm_type": math.inf}, ranks=3),
    "norm not reached": Row({"gradient_clip_val": 100.0}, strategy={"nonfinite_grads": "raise"}, ranks=3),
    "norm looked for": Row({}, strategy={"nonfinite_grads": "skip"}, norm="known"),
    "value and norm": Row(VALUE, strategy={"nonfinite_grads": "skip"}, norm="known"),
    "fused": Row({**BY_3, **NORM}, partial(Regression, fused), truth={"optimizer": adamw}),
    "by the module": Row({}, ByTheModule, truth=clipped_before(partial(clip_grad_norm_, max_norm=0.2)), norm="known"),
    "by torch": Row(BY_3, ByTorch, truth=clipped_before(partial(clip_grad_norm_, max_norm=0.2))),
    "halved, then clipped": Row(
        {}, HalvesFirst, {"nonfinite_grads": "skip"}, truth=clipped_before(truly_halved), norm="another"
    ),
    "hooks look": Row(BY_3, Looks, truth={"optimizer": plain_sgd}),
    "hooks look, weighted": Row(BY_3, partial(Looks, weighted=True), weights=WEIGHTS, truth={"optimizer": plain_sgd}),
    "targets ignored": Row(BY_3, Ignoring, weights=WEIGHTS, truth={"loss_of": classified}),
    "zeroed in place": Row(BY_3, partial(ZeroesInPlace, weighted=True), weights=WEIGHTS),
    "by the loss": Row(
        {}, partial(Regression, StepsByTheLoss, True), weights=WEIGHTS, truth={"optimizer": StepsByTheLoss}
    ),
    "not finite": poisoned((3,), {}, math.inf, adamw),
    "not finite, at once and at the end": poisoned((0, 6), {}),
    "not finite, two in a row": poisoned((2, 3), {}, optimizer=adamw),
    "not finite, clipped by norm": poisoned((3,), NORM, math.inf),
    "not finite, clipped by value": poisoned((3,), VALUE, math.inf, adamw),
    "not finite, first of a window": poisoned((3,), BY_3, optimizer=adamw),
    "not finite, last of a window": poisoned((5,), {**BY_3, **NORM}, math.inf, adamw),
    "not finite, short window": poisoned((6,), BY_3),
}
VISIBLE = ("ddp_tuned", "exposed")
FOR = {**dict.fromkeys(("by torch", "hooks look", "hooks look, weighted"), VISIBLE), "by the loss": KINDS[:3]}
"""What a user has hidden, neither hooks nor torch's functions find."""


class Outcome(NamedTuple):
    """How far parameters are from the truth's; norms, and the truth's; and what became of steps left out."""

    parameters: float
    norms: list[Tensor]
    true_norms: list[float]
    skipped: int
    warnings: list[str]


def trained(row: Row, chosen: Any) -> Any:
    module = row.module()
    trainer = make_trainer(
        chosen, use_distributed_sampler=False, **(row.trainer() if callable(row.trainer) else row.trainer)
    )
    trainer.fit(module, row.loader(ranks_batches(row.batches, row.weights)[dist.get_rank()]))
    return module


def truth_of(row: Row, trainer: Trainer) -> big_batch.Truth:
    windows = row.windows or every(trainer.accumulate_grad_batches, row.batches) * (trainer.max_epochs or 1)
    windows = [window if set(window).isdisjoint(row.poisoned) else [] for window in windows]
    limit, by_value = trainer.gradient_clip_val, trainer.gradient_clip_algorithm == "value"
    clip = {"max_value" if by_value else "max_norm": limit, "norm_type": float(row.strategy.get("norm_type", 2.0))}
    return train_on_big_batches(windows_of(ranks_batches(row.batches, row.weights), windows), **clip, **row.truth)


def outcomes(name: str, kinds: Sequence[str]) -> dict[str, Outcome]:
    row, found = ROWS[name], {}
    for kind in kinds:
        chosen = strategy(kind, **row.strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = trained(row, chosen)
        truth = truth_of(row, module.trainer)
        found[kind] = Outcome(
            distance(module.seen, truth.parameters),
            module.norms,
            truth.norms,
            chosen.skipped_steps,
            [str(one.message) for one in caught if re.search("loss_weight|not finite", str(one.message))],
        )
    return found


def clips_by_norm(row: Row) -> bool:
    flags = row.trainer() if callable(row.trainer) else row.trainer
    return "gradient_clip_val" in flags and "gradient_clip_algorithm" not in flags


@pytest.mark.parametrize(("name", "kinds"), by_pairs(ROWS, FOR))
def test_a_step_is_that_of_one_big_batch(pool: RankPool, name: str, kinds: tuple[str, ...]) -> None:
    row = ROWS[name]
    ranks = pool.run(row.ranks, outcomes, name, kinds)
    for number, found in enumerate(ranks):
        assert {kind: one.parameters for kind, one in found.items() if not one.parameters <= 2e-6} == {}
        for kind, one in found.items():
            assert one.skipped == sum(map(math.isnan, one.true_norms)) == row.skipped, kind
            assert len(one.warnings) == (row.skipped if number == 0 else 0), kind
            assert all(norm.shape == () for norm in one.norms)
            if row.norm == "known" or clips_by_norm(row):
                for norm, of_rank_0, true in zip(one.norms, ranks[0][kind].norms, one.true_norms, strict=True):
                    # To the last bit: what ranks clip by different factors would drift apart.
                    assert math.isnan(true) or (abs(norm - true) <= 1e-5 * true and torch.equal(norm, of_rank_0)), kind
            elif row.norm == "":
                assert all(map(math.isnan, one.norms)), kind


# Micro-batches without weight, on one rank each, whose gradients are NaN: flags, and arguments of the strategy.
NAN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (BY_3, {"nonfinite_grads": "skip"}),
    ({"accumulate_grad_batches": 2, **NORM}, {}),
]


class OnDevice(_HostCopy):
    """As on a GPU: losses are multiplied by a tensor, and the host asks for the number later."""

    def __init__(self, weight: float) -> None:
        self.on_device, self._value = torch.tensor(weight), weight


def nan_without_weight(on_device: bool) -> list[str]:
    found = []
    read = mock.patch.object(LossWeights, "_read", lambda _, weight: OnDevice(weight)) if on_device else nullcontext()
    for kind, (flags, arguments) in zip(KINDS, NAN * 2, strict=False):
        module = Divides()
        with read, pytest.raises(InconsistentWeightsError) as raised:
            trained(Row(flags, lambda module=module: module, arguments, weights=WEIGHTS), strategy(kind, **arguments))
        found.append(str(raised.value))
        assert not any(parameter._backward_hooks for parameter in module.parameters())
    return found


def test_nan_of_a_micro_batch_without_weight_is_an_error_on_all_ranks(pool: RankPool) -> None:
    (messages, same), of_devices = (pool.run(2, nan_without_weight, on_device) for on_device in (False, True))
    assert messages == same and of_devices == [messages] * 2
    for message in messages:
        assert "rank 1: The gradients of a micro-batch whose `loss_weight` is 0 are not finite" in message
        assert "`mask.sum().clamp(min=1)`" in message


def kept_gradients() -> list[str]:
    found = []
    # Shards add means to means, and need no error.
    for kind in ("ddp_tuned", "zero3", "exposed"):
        trained(Row(BY_3, partial(TrainsMore, weighted=True), weights=WEIGHTS), strategy(kind))
        for row in (Row({"accumulate_grad_batches": 2}, Keeps, batches=3), Row({}, partial(Keeps, weighted=True))):
            with pytest.raises(RuntimeError) as raised:
                trained(row._replace(weights=WEIGHTS if not row.trainer else (1.0,)), strategy(kind))
            found.append(str(raised.value))
    return found


def test_gradients_of_an_earlier_step_are_not_multiplied_by_a_factor(pool: RankPool) -> None:
    for messages in pool.run(2, kept_gradients):
        assert all("Gradients of an earlier step were not zeroed" in message for message in messages)


def some_give_none(kinds: Sequence[str]) -> list[float]:
    """How far trainings on one rank are from ddp's if a micro-batch of a window has no loss: the first, or the last."""
    apart = []
    for none_at in ((3,), (0, 1), (5,)):
        row = Row(BY_3, partial(Steps, none_at))
        stock = trained(row, DDPStrategy()).seen
        for kind in kinds:
            apart.append(distance(trained(row, strategy(kind, partial_window="lightning")).seen, stock))
    return apart


def test_a_micro_batch_without_a_loss_counts_as_zero_as_under_ddp(pool: RankPool) -> None:
    assert worst(pool.run(1, some_give_none, KINDS)[0]) <= 2e-6
