"""Steps whose gradients are not finite on any rank: left out, an error, or passed on as by Lightning's ddp."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_parstrat.errors import NonfiniteGradientError
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Sample, flat, sgd
from tests.strategies.gradients.poison import BATCHES, Poisoned, Snapshots, adamw, fused, run, state_of
from tests.strategies.gradients.trainings import by_pairs, ranks_batches, strategy
from tests.strategies.parity import make_trainer, whole

NORM: dict[str, Any] = {"gradient_clip_val": 0.2}
VALUE: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
BY_3: dict[str, Any] = {"accumulate_grad_batches": 3}
# Which batches are poisoned, which of them (those of the same window) the oracle never draws, and the Trainer's flags.
SKIPPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "in the middle": ((3,), (3,), {}),
    "at once and at the end": ((0, 6), (0, 6), {}),
    "two in a row": ((2, 3), (2, 3), {}),
    "clipped by norm": ((3,), (3,), NORM),
    "clipped by value": ((3,), (3,), VALUE),
    "first of a window": ((3,), (3, 4, 5), BY_3),
    "last of a window": ((5,), (3, 4, 5), {**BY_3, **NORM}),
    "short window": ((6,), (6,), BY_3),
    "bf16-mixed": ((3,), (3,), {"precision": "bf16-mixed"}),
}


def skip(case: str, kinds: Sequence[str]) -> dict[str, tuple[float, float, int]]:
    """How far a skipped step went, how far the end is from that of ddp without the batches, and what was counted."""
    poisoned, left_out, arguments = SKIPPED[case]
    window = arguments.get("accumulate_grad_batches", 1)
    found = {}
    for optimizer, value in ((sgd, math.nan), (adamw, math.inf)):
        stock = run(DDPStrategy(), Poisoned(optimizer=optimizer), left_out, **arguments)
        for kind in kinds:
            chosen = strategy(kind, nonfinite_grads="skip", partial_window="lightning")
            taken = run(chosen, Poisoned(poisoned, value=value, optimizer=optimizer), **arguments)
            moved = [
                distance(state_of(taken[end]), state_of(taken[end - 1]))
                for end in {min(index - index % window + window, BATCHES) - 1 for index in poisoned}
                if end and state_of(taken[end - 1])[1]
            ]
            end = distance(taken[-1].parameters, stock[-1].parameters)
            found[f"{kind}, {value}"] = worst(moved), end, taken[-1].skipped
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(SKIPPED))
def test_a_skipped_step_is_as_if_it_had_not_been(pool: RankPool, case: str, kinds: tuple[str, ...]) -> None:
    tolerance = 5e-3 if case == "bf16-mixed" else 1e-6
    for found in pool.run(2, skip, case, kinds):
        for kind, (moved, end, skipped) in found.items():
            assert moved == 0.0, kind
            assert end <= tolerance, kind
            assert skipped == len(SKIPPED[case][0]), kind


class Repairs(Poisoned):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class SpoilsOnRank1(Poisoned):
    """Makes gradients NaN when they have been averaged, on one rank alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.count == 3 and dist.get_rank() == 1:
            self.get_parameter(ONE).grad.fill_(math.nan)


def hooks_change_gradients() -> list[tuple[int, float]]:
    """Steps left out, and the distance from ddp's end; then the same of the other rank's end."""
    found = []
    for kind in ("ddp_tuned", "exposed"):
        for arguments in ({}, NORM):
            reference = run(DDPStrategy(), Repairs((2, 4)), **arguments)
            finished = run(strategy(kind, nonfinite_grads="skip"), Repairs((2, 4)), **arguments)
            found.append((finished[-1].skipped, distance(finished[-1].parameters, reference[-1].parameters)))
        module = SpoilsOnRank1()
        skipped = run(strategy(kind, nonfinite_grads="skip"), module)[-1].skipped
        others = [torch.empty_like(flat(module)) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat(module))
        found.append((skipped, distance(others[0], others[1])))
    return found


def test_what_hooks_repair_is_stepped_with_and_what_one_makes_nan_is_left_out_on_all(pool: RankPool) -> None:
    for found in pool.run(2, hooks_change_gradients):
        assert [skipped for skipped, _ in found] == [0, 0, 1] * 2
        assert worst([apart for _, apart in found]) <= 1e-6


SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (sgd, {}),
    "clipped": (adamw, NORM),
    "fused": (fused, {}),
    "fused, clipped": (fused, NORM),
    "fused, clipped by value": (fused, VALUE),
    "accumulated": (sgd, {"accumulate_grad_batches": 2, **VALUE}),
}


def half_precision(case: str, kinds: Sequence[str]) -> dict[tuple[str, str], Any]:
    """As stock 16-mixed? With a first scale so large that steps are left out for it, too."""
    optimizer, arguments = SCALED[case]
    arguments = {**arguments, "fp16": True, "init_scale": 2.0**20}
    # Lightning refuses to clip for fused optimizers.
    stock = run(DDPStrategy(), Poisoned((4,), optimizer=adamw if optimizer is fused else optimizer), **arguments)
    scales = [one.scale for one in stock]
    halved = sum(after < before for before, after in zip([2.0**20, *scales], scales, strict=False))
    found = {}
    for kind in kinds:
        for choice in ("propagate", "skip"):
            chosen = strategy(kind, nonfinite_grads=choice, partial_window="lightning")
            ours = run(chosen, Poisoned((4,), optimizer=optimizer), **arguments)
            apart = [distance(one.parameters, other.parameters) for one, other in zip(ours, stock, strict=True)]
            same_scales = [one.scale for one in ours] == scales
            found[kind, choice] = same_scales, ours[-1].skipped, halved, worst(apart)
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(SCALED))
def test_the_loss_scale_goes_on_as_stock_and_its_skips_are_counted(
    pool: RankPool, case: str, kinds: tuple[str, ...]
) -> None:
    for found in pool.run(2, half_precision, case, kinds):
        for kind, (same_scales, skipped, halved, difference) in found.items():
            assert same_scales, kind
            assert skipped == halved >= 2, kind
            assert difference <= 1e-4, kind


def reading_weights(kind: str) -> dict[str, Any]:
    """Arguments for a module that reads weights in its training step: of units that can be done in `forward` alone."""
    return {"min_num_params": 100_000} if kind == "zero3" else {}


ONE, TWO = "network.0.bias", "network.2.weight"


class Spoils(Poisoned):
    """Makes gradients infinite when backward is over."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with getattr(self.trainer.strategy, "full_gradients", torch.no_grad)():
            if self.count - 1 in self.at:
                self.get_parameter(ONE).grad.fill_(math.inf)

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.count += 1
        return super(Poisoned, self).training_step(batch, batch_idx)


# The module, what it does on which ranks, the Trainer's flags, and the error's place; "" where there is none.
RAISED: dict[str, tuple[type[Poisoned], dict[str, Any], tuple[int, ...], dict[str, Any], str]] = {
    "one": (Poisoned, {"only": TWO}, (1,), {}, "in epoch 0, batch 4"),
    "infinite on two ranks": (Poisoned, {"only": ONE, "value": math.inf}, (0, 2), {}, "in epoch 0, batch 4"),
    "in a window": (Poisoned, {"only": TWO}, (2,), {**BY_3, **NORM}, "in epoch 0, batch 5"),
    "all": (Poisoned, {}, (0,), {}, "in epoch 0, batch 4"),
    "by a hook": (Spoils, {}, (0, 1, 2), {}, "in epoch 0, batch 4"),
    "large squares": (Poisoned, {"only": ONE, "value": 1e30}, (0, 1), {}, ""),
}
SHOWN = {"by a hook": ("ddp_tuned", "zero1", "zero2", "exposed")}


def raise_at(case: str, kinds: Sequence[str]) -> dict[str, Any]:
    """What was raised; what it left of the step; and whether the same module trains on."""
    cls, poison, ranks, arguments, _ = RAISED[case]
    found = {}
    for kind in kinds:
        module = cls(
            optimizer=adamw, **{**poison, "rank": dist.get_rank(), "at": (4,) if dist.get_rank() in ranks else ()}
        )
        batches = big_batch.loader(ranks_batches(BATCHES)[dist.get_rank()])
        message, snapshots, again = "", Snapshots(), Snapshots()
        for callback in (snapshots, again):
            chosen = strategy(kind, nonfinite_grads="raise", **reading_weights(kind))
            trainer = make_trainer(chosen, use_distributed_sampler=False, callbacks=[callback], **arguments)
            try:
                trainer.fit(module, batches)
            except NonfiniteGradientError as error:
                message = str(error)
            if callback is snapshots:
                after = [whole(parameter.detach()).clone() for parameter in module.parameters()]
                module.at, module.count = (), 0
        left = distance(snapshots.taken[-1].parameters, after)
        finite = all(bool(parameter.isfinite().all()) for parameter in again.taken[-1].parameters)
        found[kind] = message, len(snapshots.taken), left, len(again.taken), finite
    return found


@pytest.mark.parametrize(("case", "kinds"), by_pairs(RAISED, SHOWN))
def test_all_ranks_raise_and_training_can_start_again(pool: RankPool, case: str, kinds: tuple[str, ...]) -> None:
    where = RAISED[case][-1]
    for found in pool.run(3, raise_at, case, kinds):
        for kind, (message, batches, left, again, finite) in found.items():
            assert where in message and bool(where) == bool(message), kind
            assert batches == (int(where[-1]) if where else BATCHES), kind
            assert left == 0.0, kind
            assert (again, finite) == (BATCHES, True), kind
