"""Manual optimization: one optimizer or two, clipped by hand, in 32 and 16 bits."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, Sample, flat, network, sgd
from tests.strategies.gradients.trainings import KINDS, by_pairs, fit, ranks_batches, strategy

BATCHES = 6
Parameters = list[Tensor]
Clip = Callable[[Any, list[Any]], None]
Truly = Callable[..., None]


def second_network() -> nn.Module:
    """Of another size, with larger gradients: neither norm may be taken for the other, or for that of both."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def losses_of(first: nn.Module, second: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    mean = nn.functional.mse_loss
    return mean(first(inputs), targets), 5 * mean(second(inputs), targets)


class TwoOptimizers(LightningModule):
    """``clip`` is called with both optimizers after backward; in ``poisoned`` batches the second has NaN."""

    def __init__(self, clip: Clip | None = None, poisoned: Sequence[int] = ()) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = network(), second_network()
        self.clip, self.poisoned = clip, poisoned
        self.seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Sample, batch_idx: int) -> None:
        optimizers = self.optimizers()
        losses = losses_of(self.first, self.second, batch.inputs, batch.targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(losses[0] + losses[1] * (math.nan if batch_idx in self.poisoned else 1.0))
        if self.clip is not None:
            self.clip(self, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        self.seen.append((flat(self.first), flat(self.second)))

    def configure_optimizers(self) -> list[Optimizer]:
        return [sgd(self.first.parameters()), sgd(self.second.parameters())]


def train_two(
    batches: Sequence[Sequence[Sample]], clip: Truly | None, skipped_by_second: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Parameters after each step on the mean over ranks, whose micro-batches ``batches`` holds by step."""
    first, second = copy.deepcopy(network()).double(), copy.deepcopy(second_network()).double()
    optimizers = [sgd(first.parameters()), sgd(second.parameters())]
    seen = []
    for index, ranks in enumerate(batches):
        for stepper in optimizers:
            stepper.zero_grad()
        for sample in ranks:
            one, other = losses_of(first, second, sample.inputs.double(), sample.targets.double())
            ((one + other) / len(ranks)).backward()
        if clip is not None:
            clip(list(first.parameters()), list(second.parameters()))
        optimizers[0].step()
        if index not in skipped_by_second:
            optimizers[1].step()
        seen.append((flat(first), flat(second)))
    return seen


def clip(*limits: float, algorithm: str = "norm", only: slice = slice(None)) -> Clip:
    """All optimizers by the first limit, then by the second."""

    def clip_optimizers(module: Any, optimizers: list[Any]) -> None:
        for limit in limits:
            for optimizer in optimizers[only]:
                module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)

    return clip_optimizers


def unscale_and_clip(module: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        module.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
    clip(0.2)(module, optimizers)


def each(*limits: float) -> Truly:
    def clip_each(*parts: Parameters) -> None:
        for limit in limits:
            for parameters in parts:
                clip_grad_norm_(parameters, limit)

    return clip_each


def together(*limits: float) -> Truly:
    return lambda first, second: each(*limits)(first + second)


def by_value(*parts: Parameters) -> None:
    for parameters in parts:
        clip_grad_value_(parameters, 0.02)


def second(first: Parameters, second: Parameters) -> None:
    clip_grad_norm_(second, 0.2)


def second_by_all(first: Parameters, second: Parameters) -> None:
    kept = [parameter.grad.clone() for parameter in first]
    clip_grad_norm_(first + second, 0.2)
    for parameter, gradient in zip(first, kept, strict=True):
        parameter.grad = gradient


class Row(NamedTuple):
    """Two optimizers, and what torch would do by hand.

    Attributes:
        clip: What the module does between backward and its steps.
        truly: The same in float64.
        scope: ``clip_scope``.
        scaled: Whether in 16-mixed.
        skipped: Steps in which the second optimizer has NaN on one rank, and is skipped.
    """

    clip: Clip | None
    truly: Truly | None
    scope: str = "optimizer"
    scaled: bool = False
    skipped: tuple[int, ...] = ()


SECOND = clip(0.2, only=slice(1, None))
ROWS = {
    "each": Row(clip(0.2), each(0.2)),
    "all": Row(clip(0.2), together(0.2), "global"),
    "value": Row(clip(0.02, algorithm="value"), by_value, "global"),
    "second": Row(SECOND, second),
    "second by all": Row(SECOND, second_by_all, "global"),
    "twice": Row(clip(0.2, 0.1), each(0.2, 0.1)),
    "all twice": Row(clip(0.2, 0.1), together(0.2, 0.1), "global"),
    "skipped, clipped": Row(clip(0.2), each(0.2), skipped=(2, 5)),
    "16: not": Row(None, None, scaled=True),
    "16: each": Row(clip(0.2), each(0.2), scaled=True),
    "16: all": Row(clip(0.2), together(0.2), "global", scaled=True),
    "16: unscaled": Row(unscale_and_clip, each(0.2), scaled=True),
    "16: all unscaled": Row(unscale_and_clip, together(0.2), "global", scaled=True),
}


def with_two_optimizers(name: str, kinds: Sequence[str]) -> dict[str, tuple[float, int]]:
    row, found = ROWS[name], {}
    truth = train_two(list(zip(*ranks_batches(BATCHES), strict=True)), row.truly, row.skipped)
    for kind in kinds:
        for nonfinite in ("skip",) if row.skipped else ("propagate",) if row.scaled else ("propagate", "skip"):
            module = TwoOptimizers(row.clip, row.skipped if dist.get_rank() == 1 else ())
            chosen = strategy(kind, clip_scope=row.scope, nonfinite_grads=nonfinite)
            # Lightning updates the scale after each optimizer's step: where it grew between, stock would be wrong, too.
            scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
            precision = {"precision": MixedPrecision("16-mixed", "cpu", scaler)} if row.scaled else {}
            fit(module, chosen, BATCHES, **precision)
            found[f"{kind}, {nonfinite}"] = distance(module.seen, truth), chosen.skipped_steps
    return found


@pytest.mark.parametrize(("name", "kinds"), by_pairs(ROWS))
def test_two_optimizers_step_as_by_hand_in_float64(pool: RankPool, name: str, kinds: tuple[str, ...]) -> None:
    # Half precision is seen in the fourth digit of gradients, a wrong scale in the first.
    tolerance = 2e-3 if ROWS[name].scaled else 2e-6
    for found in pool.run(2, with_two_optimizers, name, kinds):
        wrong = {
            kind: one for kind, one in found.items() if not one[0] <= tolerance or one[1] != len(ROWS[name].skipped)
        }
        assert wrong == {}


class InTurns(TwoOptimizers):
    """As a GAN does: the first backward leaves gradients of the second optimizer, which are zeroed before its own."""

    clips_second = True

    def training_step(self, batch: Sample, batch_idx: int) -> None:
        first, second = self.optimizers()
        mean = nn.functional.mse_loss
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(
                mean(self.first(batch.inputs), batch.targets) + mean(self.second(batch.inputs), batch.targets)
            )
            if optimizer is first or self.clips_second:
                clip(0.2)(self, [optimizer])
            optimizer.step()


def refused_in_turns(kinds: Sequence[str]) -> list[str]:
    found = []
    for kind in kinds:
        for scope, clips in (("optimizer", True), ("global", True), ("global", False)):
            module = InTurns()
            module.clips_second = clips
            try:
                fit(module, strategy(kind, clip_scope=scope), BATCHES, fp16=True)
            except RuntimeError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


def test_in_16_mixed_gradients_that_are_partly_unscaled_are_refused(pool: RankPool) -> None:
    for found in pool.run(2, refused_in_turns, KINDS[:2]):
        for message, expected in zip(
            found, ("", *["another backward came before their optimizer"] * 2) * 2, strict=True
        ):
            assert expected in message and bool(expected) == bool(message)


class ByHand(Regression):
    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(output["loss"] if self.weighted else output)
        self.optimizers().step()
        return output


def by_hand(kind: str) -> tuple[float, int]:
    modules = ByHand(weighted=True), ByHand()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            module.automatic_optimization = False
            fit(module, strategy(kind), BATCHES)
    said = sum("`loss_weight` has no effect in manual optimization" in str(one.message) for one in caught)
    return distance(modules[0].seen, modules[1].seen), said


def test_a_warning_says_that_weights_have_no_effect_in_manual_optimization(pool: RankPool) -> None:
    for kind in KINDS[:2]:
        assert pool.run(2, by_hand, kind) == [(0.0, 1), (0.0, 0)]
