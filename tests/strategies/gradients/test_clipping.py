"""Clipping by the truth of torch's own functions: in every precision, by hand or by the Trainer."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Regression, Sample, sgd, train_on_big_batches, windows_of
from tests.strategies.gradients.poison import adamw, fused
from tests.strategies.gradients.trainings import differences, fit, kinds_of, ranks_batches, strategy
from tests.strategies.gradients.two_optimizers import TwoOptimizers, flat, train_two

BATCHES = 6
NORM = {"gradient_clip_val": 0.2}
VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


def fused_or_not(kind: str, clip: dict[str, Any], precision: dict[str, Any]) -> float:
    modules = [Regression(fused), Regression(adamw)]
    for module in modules:
        fit(module, strategy(kind), BATCHES, **clip, **precision)
    return distance(modules[0].seen, modules[1].seen)


PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "32": ({}, 1e-6),
    "bf16": ({"precision": "bf16-mixed"}, 5e-3),
    "16": ({"fp16": True}, 1e-3),
    "16 that overflows": ({"fp16": True, "init_scale": 2e6}, 1e-3),
}


@pytest.mark.parametrize(("name", "kind"), kinds_of(PRECISIONS))
@pytest.mark.parametrize("clip", [NORM, VALUE], ids=["norm", "value"])
def test_fused_optimizers_step_as_those_that_are_not(
    pool: RankPool, kind: str, clip: dict[str, Any], name: str
) -> None:
    precision, tolerance = PRECISIONS[name]
    assert worst(pool.run(2, fused_or_not, kind, clip, precision)) <= tolerance


def norm_of_type(kind: str, norm_type: float, accumulate: int) -> tuple[float, float]:
    data = ranks_batches(8)
    module = Regression()
    # Small enough for a sum of absolute values, or for the largest of them, to be cut by it.
    fit(module, strategy(kind, norm_type=norm_type), 8, accumulate_grad_batches=accumulate, gradient_clip_val=0.03)
    truth = train_on_big_batches(windows_of(data, accumulate), 0.03, norm_type)
    assert all(norm > 0.03 for norm in truth.norms)
    return differences(module, truth, accumulate, 8)


@pytest.mark.parametrize(("norm_type", "kind"), kinds_of([1, 2.0, 3.0, math.inf]))
def test_any_norm_clips_as_torch_would(pool: RankPool, norm_type: float, kind: str) -> None:
    world_size = 3 if norm_type in (2.0, math.inf) else 2
    for accumulate in (1, 3):
        for parameters, norms in pool.run(world_size, norm_of_type, kind, norm_type, accumulate):
            assert parameters <= 2e-6
            assert norms <= 1e-5


def clip_both(module: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        module.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def clip_both_by_value(module: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        module.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")


def clip_second(module: Any, optimizers: list[Any]) -> None:
    module.clip_gradients(optimizers[1], gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def clip_twice(module: Any, optimizers: list[Any]) -> None:
    for limit in (0.2, 0.1):
        for optimizer in optimizers:
            module.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


def unscale_and_clip(module: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        module.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
    clip_both(module, optimizers)


Parameters = list[Tensor]


def truly_each(first: Parameters, second: Parameters) -> None:
    for parameters in (first, second):
        clip_grad_norm_(parameters, 0.2)


def truly_all(first: Parameters, second: Parameters) -> None:
    clip_grad_norm_(first + second, 0.2)


def truly_by_value(first: Parameters, second: Parameters) -> None:
    clip_grad_value_(first + second, 0.02)


def truly_second(first: Parameters, second: Parameters) -> None:
    clip_grad_norm_(second, 0.2)


def truly_second_by_all(first: Parameters, second: Parameters) -> None:
    kept = [parameter.grad.clone() for parameter in first]
    clip_grad_norm_(first + second, 0.2)
    for parameter, gradient in zip(first, kept, strict=True):
        parameter.grad = gradient


def truly_each_twice(first: Parameters, second: Parameters) -> None:
    for limit in (0.2, 0.1):
        for parameters in (first, second):
            clip_grad_norm_(parameters, limit)


def truly_all_twice(first: Parameters, second: Parameters) -> None:
    for limit in (0.2, 0.1):
        clip_grad_norm_(first + second, limit)


BY_HAND: dict[str, tuple[str, Any, Any]] = {
    "each": ("optimizer", clip_both, truly_each),
    "all": ("global", clip_both, truly_all),
    "value": ("global", clip_both_by_value, truly_by_value),
    "second": ("optimizer", clip_second, truly_second),
    "second by all": ("global", clip_second, truly_second_by_all),
    "twice": ("optimizer", clip_twice, truly_each_twice),
    "all twice": ("global", clip_twice, truly_all_twice),
}


def by_hand(kind: str, case: str, nonfinite: str) -> float:
    scope, clip, truly = BY_HAND[case]
    module = TwoOptimizers(clip)
    fit(module, strategy(kind, clip_scope=scope, nonfinite_grads=nonfinite), BATCHES)
    return distance(module.seen, train_two(list(zip(*ranks_batches(BATCHES), strict=True)), truly))


@pytest.mark.parametrize(("case", "kind"), kinds_of(BY_HAND, "all"))
def test_two_optimizers_are_clipped_by_hand_each_alone_or_as_one(pool: RankPool, case: str, kind: str) -> None:
    for nonfinite in ("propagate", "skip"):
        assert worst(pool.run(2, by_hand, kind, case, nonfinite)) <= 2e-6


class OneByHand(Regression):
    """Manual optimization with one optimizer, in a loop of the user's own."""

    def __init__(self, clip: Callable[[Any, list[Any]], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip
        self.scales: list[float] = []

    def training_step(self, batch: Sample, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.network(batch.inputs), batch.targets))
        self.clip(self, [optimizer])
        optimizer.step()
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def autocast_truth(clip: Callable[[Parameters], None], first_scale: float) -> tuple[list[Tensor], list[float]]:
    """torch's own recipe for one network: scaled losses, unscaled gradients, clipped; the ranks' batches in turn."""
    model = big_batch.network()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=3)
    seen, scales = [], []
    for ranks in zip(*ranks_batches(BATCHES), strict=True):
        optimizer.zero_grad()
        for sample in ranks:
            with torch.autocast("cpu", dtype=torch.half, cache_enabled=False):
                loss = nn.functional.mse_loss(model(sample.inputs), sample.targets)
            scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad.div_(len(ranks))
        scaler.unscale_(optimizer)
        clip(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        seen.append(flat(model))
        scales.append(scaler.get_scale())
    return seen, scales


def truly_one(parameters: Parameters) -> None:
    clip_grad_norm_(parameters, 0.2)


def truly_one_by_value(parameters: Parameters) -> None:
    clip_grad_value_(parameters, 0.02)


def truly_one_twice(parameters: Parameters) -> None:
    for limit in (0.2, 0.1):
        clip_grad_norm_(parameters, limit)


def scaled_by_hand(kind: str, clip: Any, truly: Any, first_scale: float) -> tuple[float, bool]:
    module = OneByHand(clip)
    fit(module, strategy(kind), BATCHES, fp16=True, init_scale=first_scale)
    seen, scales = autocast_truth(truly, first_scale)
    return distance(module.seen, seen), module.scales == scales


ONE_BY_HAND: dict[str, tuple[Any, Any]] = {
    "norm": (clip_both, truly_one),
    "value": (clip_both_by_value, truly_one_by_value),
    "twice": (clip_twice, truly_one_twice),
    "unscaled": (unscale_and_clip, truly_one),
}


@pytest.mark.parametrize(("case", "kind"), kinds_of(ONE_BY_HAND))
def test_by_hand_in_16_mixed_true_gradients_are_clipped(pool: RankPool, kind: str, case: str) -> None:
    clip, truly = ONE_BY_HAND[case]
    # The larger scale overflows at first: those steps are left out.
    for first_scale in (128.0, 2.0**21):
        for difference, same_scales in pool.run(2, scaled_by_hand, kind, clip, truly, first_scale):
            assert difference <= 1e-5
            assert same_scales


SCALED_BY_HAND = {
    **{case: BY_HAND[case] for case in ("each", "all", "second")},
    "not": ("optimizer", None, None),
    "unscaled": ("optimizer", unscale_and_clip, truly_each),
    "all unscaled": ("global", unscale_and_clip, truly_all),
}


def two_scaled_by_hand(kind: str, case: str) -> float:
    scope, clip, truly = SCALED_BY_HAND[case]
    module = TwoOptimizers(clip)
    # Lightning updates the scale after each optimizer's step: where it grew between them, stock would be wrong as well.
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    fit(module, strategy(kind, clip_scope=scope), BATCHES, precision=MixedPrecision("16-mixed", "cpu", scaler))
    return distance(module.seen, train_two(list(zip(*ranks_batches(BATCHES), strict=True)), truly))


@pytest.mark.parametrize(("case", "kind"), kinds_of(SCALED_BY_HAND, "all"))
def test_by_hand_in_16_mixed_two_optimizers_are_clipped_once_each(pool: RankPool, case: str, kind: str) -> None:
    # Against float64: half precision is seen in the fourth digit of gradients, a wrong scale in the first.
    assert worst(pool.run(2, two_scaled_by_hand, kind, case)) <= 2e-3
