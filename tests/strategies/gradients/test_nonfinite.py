"""Steps whose gradients are not finite on any rank: left out, told about, or passed on as Lightning's ddp does."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.gradients.nonfinite import NonfiniteGradientError
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Sample, sgd
from tests.strategies.gradients.poison import BATCHES, Poisoned, Snapshots, adamw, fused, run, state_of
from tests.strategies.gradients.trainings import kinds_of, ranks_batches, strategy
from tests.strategies.gradients.two_optimizers import TwoOptimizers, train_two
from tests.strategies.parity import make_trainer, whole

# Which batches are poisoned, which of them (those of the same window) an undisturbed run leaves out, and the Trainer's.
SKIPPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "in the middle": ((3,), (3,), {}),
    "at once and at the end": ((0, 6), (0, 6), {}),
    "two in a row": ((2, 3), (2, 3), {}),
    "clipped by norm": ((3,), (3,), {"gradient_clip_val": 0.2}),
    "clipped by value": ((3,), (3,), {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "first of a window": ((3,), (3, 4, 5), {"accumulate_grad_batches": 3}),
    "last of a window": ((5,), (3, 4, 5), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}),
    "short window": ((6,), (6,), {"accumulate_grad_batches": 3}),
    "bf16-mixed": ((3,), (3,), {"precision": "bf16-mixed"}),
}


def skip(kind: str, poisoned: tuple[int, ...], left_out: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """For two optimizers and two poisons: how far the skipped step went, how far the end is, and what was counted."""
    found = []
    for optimizer, value in ((sgd, math.nan), (adamw, math.inf)):
        module = Poisoned(poisoned, value=value, optimizer=optimizer)
        disturbed = run(strategy(kind, nonfinite_grads="skip"), module, **arguments)
        undisturbed = run(
            strategy(kind, nonfinite_grads="skip"), Poisoned(optimizer=optimizer), left_out=left_out, **arguments
        )
        window = arguments.get("accumulate_grad_batches", 1)
        moved = [
            distance(state_of(disturbed[end]), state_of(disturbed[end - 1]))
            for end in {min(index - index % window + window, BATCHES) - 1 for index in poisoned}
            if end and state_of(disturbed[end - 1])[1]
        ]
        # The scheduler's own step comes before a batch's end, but Lightning knows nothing of its state's true meaning.
        end = distance(
            (state_of(disturbed[-1]), disturbed[-1].scheduler, disturbed[-1].rate),
            (state_of(undisturbed[-1]), undisturbed[-1].scheduler, undisturbed[-1].rate),
        )
        found.append((worst(moved), end, disturbed[-1].skipped, undisturbed[-1].skipped))
    return found


@pytest.mark.parametrize(("case", "kind"), kinds_of(SKIPPED, "last of a window"))
def test_a_skipped_step_is_as_if_it_had_not_been(pool: RankPool, case: str, kind: str) -> None:
    poisoned, left_out, arguments = SKIPPED[case]
    for found in pool.run(2, skip, kind, poisoned, left_out, arguments):
        for moved, end, skipped, skipped_undisturbed in found:
            assert moved == 0.0
            assert end <= 1e-6
            assert (skipped, skipped_undisturbed) == (len(poisoned), 0)


def agreements(poisoned: tuple[int, ...]) -> list[int]:
    """Small messages of a training that goes on whatever gradients are, and of one that leaves steps out."""
    found = []
    for nonfinite_grads in ("propagate", "skip"):
        groups = process_groups(default_pg_timeout)
        before = sum(map(small_reductions_of, groups))
        run(strategy("zero1", nonfinite_grads=nonfinite_grads), Poisoned(poisoned), gradient_clip_val=0.2)
        found.append(sum(map(small_reductions_of, groups)) - before)
    return found


def test_the_norm_tells_all_ranks_whether_a_step_is_left_out(pool: RankPool) -> None:
    for goes_on, leaves_out in pool.run(2, agreements, ()):
        assert leaves_out == goes_on
    # What is not finite is looked at once more: its largest element tells whether only the norm was too large.
    for goes_on, leaves_out in pool.run(2, agreements, (3,)):
        assert leaves_out == goes_on + 1


class ManySchedulers(Poisoned):
    """Schedulers that go by steps, by every second batch and by epochs; says who was stepped when."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        schedulers = torch.optim.lr_scheduler
        self.calls: list[tuple[str, int]] = []
        return [optimizer], [
            {"scheduler": schedulers.ExponentialLR(optimizer, 0.9), "interval": "step"},
            {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9),
                "interval": "step",
                "frequency": 2,
                "monitor": "batch",
            },
            {"scheduler": schedulers.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        ]

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.log("batch", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append((type(scheduler).__name__, self.count - 1))
        super().lr_scheduler_step(scheduler, metric)


def schedule(kind: str) -> Any:
    module = ManySchedulers((1, 3, 6, 7))
    trainer = make_trainer(strategy(kind, nonfinite_grads="skip"), max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, big_batch.loader(ranks_batches(BATCHES)[dist.get_rank()]))
    return module.calls, [config.frequency for config in trainer.lr_scheduler_configs]


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_schedulers_by_steps_wait_and_all_others_go_on(pool: RankPool, kind: str) -> None:
    stepped = [index for index in range(2 * BATCHES) if index not in (1, 3, 6, 7)]
    expected = [("ExponentialLR", index) for index in stepped]
    expected += [("ReduceLROnPlateau", index) for index in stepped if index % BATCHES % 2]
    expected += [("StepLR", 6), ("StepLR", 13)]
    for calls, frequencies in pool.run(2, schedule, kind):
        assert sorted(calls) == sorted(expected)
        assert frequencies == [1, 2, 1]


class Saves(Callback):
    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if args[-1] == self.batch:
            trainer.save_checkpoint(self.path)


def resume_after_skip(kind: str, path: str) -> tuple[float, dict[str, Any], list[int]]:
    whole = run(strategy(kind, nonfinite_grads="skip"), Poisoned((3,), optimizer=adamw), callbacks=[Saves(path, 3)])
    saved = torch.load(path, weights_only=False)["lr_schedulers"][0]
    snapshots = Snapshots()
    trainer = make_trainer(strategy(kind, nonfinite_grads="skip"), use_distributed_sampler=False, callbacks=[snapshots])
    rest = big_batch.loader(ranks_batches(BATCHES)[dist.get_rank()][4:])
    trainer.fit(Poisoned(optimizer=adamw), rest, ckpt_path=path, weights_only=False)
    assert len(snapshots.taken) == 3
    return distance(snapshots.taken[-1][:4], whole[-1][:4]), saved, [c.frequency for c in trainer.lr_scheduler_configs]


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_a_checkpoint_after_a_skipped_step_goes_on_where_it_was(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for difference, scheduler, frequencies in pool.run(2, resume_after_skip, kind, str(tmp_path / "a.ckpt")):
        assert difference <= 1e-6
        assert scheduler["last_epoch"] == 3
        assert scheduler["_last_lr"] == pytest.approx([0.02 * 0.8**3])
        assert frequencies == [1]


class Repairs(Poisoned):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def repair(kind: str, arguments: dict[str, Any]) -> tuple[int, float]:
    finished = run(strategy(kind, nonfinite_grads="skip"), Repairs((2, 4)), **arguments)
    reference = run(DDPStrategy(), Repairs((2, 4)), **arguments)
    return finished[-1].skipped, distance(finished[-1].parameters, reference[-1].parameters)


@pytest.mark.parametrize("kind", ["ddp_tuned", "exposed"])
@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 0.2}])
def test_gradients_that_a_hook_repairs_are_stepped_with(pool: RankPool, kind: str, arguments: dict[str, Any]) -> None:
    for skipped, difference in pool.run(2, repair, kind, arguments):
        assert skipped == 0
        assert difference <= 1e-6


def half_precision(kind: str, choice: Any, optimizer: Callable[[Any], Any], arguments: dict[str, Any]) -> Any:
    """As stock 16-mixed? With a first scale so large that steps are left out for it, too."""
    arguments = {**arguments, "fp16": True, "init_scale": 2.0**20}
    chosen = strategy(kind, nonfinite_grads=choice, partial_window="lightning")
    ours = run(chosen, Poisoned((4,), optimizer=optimizer), **arguments)
    # Lightning refuses to clip for fused optimizers.
    reference = adamw if optimizer is fused else optimizer
    stock = run(DDPStrategy(), Poisoned((4,), optimizer=reference), **arguments)
    scales = [one.scale for one in ours], [one.scale for one in stock]
    halved = sum(after < before for before, after in zip([2.0**20, *scales[1]], scales[1], strict=False))
    parameters = [distance(one.parameters, other.parameters) for one, other in zip(ours, stock, strict=True)]
    rates = [one.rate for one in ours], [one.rate for one in stock]
    return scales, ours[-1].skipped, halved, worst(parameters), rates


SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (sgd, {}),
    "clipped": (adamw, {"gradient_clip_val": 0.2}),
    "fused": (fused, {}),
    "fused clipped": (fused, {"gradient_clip_val": 0.2}),
    "accumulated": (
        sgd,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
}


@pytest.mark.parametrize("choice", ["propagate", "skip"])
@pytest.mark.parametrize(("case", "kind"), kinds_of(SCALED, "fused clipped"))
def test_the_loss_scale_goes_on_as_stock_and_its_skips_are_counted(
    pool: RankPool, case: str, kind: str, choice: Any
) -> None:
    optimizer, arguments = SCALED[case]
    for scales, skipped, halved, difference, rates in pool.run(2, half_precision, kind, choice, optimizer, arguments):
        assert scales[0] == scales[1]
        assert skipped == halved >= 2
        if choice == "propagate":
            # Stock's schedulers go on where the scaler has skipped.
            assert difference <= 1e-4
            assert rates[0] == pytest.approx(rates[1])
        else:
            assert rates[0][-1] == pytest.approx(rates[1][-1] / 0.8**skipped)


def skip_one_of_two(kind: str, clip: Any, arguments: dict[str, Any]) -> tuple[float, int]:
    batches = ranks_batches(BATCHES)
    module = TwoOptimizers(clip, poisoned=(2, 5), poisons=dist.get_rank() == 1)
    chosen = strategy(kind, nonfinite_grads="skip")
    make_trainer(chosen, use_distributed_sampler=False, **arguments).fit(
        module, big_batch.loader(batches[dist.get_rank()])
    )

    def each_by_its_norm(*parameters: list[Tensor]) -> None:
        for of_one in parameters:
            torch.nn.utils.clip_grad_norm_(of_one, 0.2)

    truth = train_two(list(zip(*batches, strict=True)), each_by_its_norm if clip else None, (2, 5))
    return distance(module.seen, truth), chosen.skipped_steps


def clip_each(module: LightningModule, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        module.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(("clip", "kind"), kinds_of([None, clip_each], clip_each))
def test_of_two_optimizers_only_that_with_nans_is_skipped(pool: RankPool, kind: str, clip: Any) -> None:
    for difference, skipped in pool.run(2, skip_one_of_two, kind, clip, {}):
        assert difference <= 2e-6
        assert skipped == 2


def reading_weights(kind: str) -> dict[str, Any]:
    """Arguments for a module that reads weights in its training step: of units that can be done in `forward` alone."""
    return {"min_num_params": 100_000} if kind == "zero3" else {}


def raise_at(kind: str, poison: dict[str, Any], ranks: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """What was raised; what it left of the step; and whether the same module trains on."""
    chosen = strategy(kind, nonfinite_grads="raise", **reading_weights(kind))
    mine = {**poison, "rank": dist.get_rank()} if dist.get_rank() in ranks else {**poison, "at": ()}
    module = Poisoned(optimizer=adamw, **mine)
    snapshots = Snapshots()
    trainer = make_trainer(chosen, use_distributed_sampler=False, callbacks=[snapshots], **arguments)
    loader = big_batch.loader(ranks_batches(BATCHES)[dist.get_rank()])
    message = "nothing was raised"
    try:
        trainer.fit(module, loader)
    except NonfiniteGradientError as error:
        message = str(error)
    before = len(snapshots.taken)
    left = distance(snapshots.taken[-1].parameters, [whole(parameter.detach()) for parameter in module.parameters()])
    module.at, module.count = (), 0
    again = Snapshots()
    chosen = strategy(kind, nonfinite_grads="raise", **reading_weights(kind))
    make_trainer(chosen, use_distributed_sampler=False, callbacks=[again], **arguments).fit(module, loader)
    return (
        message,
        before,
        left,
        len(again.taken),
        all(bool(parameter.isfinite().all()) for parameter in again.taken[-1].parameters),
    )


ONE, TWO = "network.0.bias", "network.2.weight"


ALL = {"network.0.weight", ONE, TWO, "network.4.weight", "network.4.bias"}


RAISED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[int, set[str]]]] = {
    "one": ({"only": TWO}, {}, {1: {TWO}}),
    "infinite on two ranks": ({"only": ONE, "value": math.inf}, {}, {0: {ONE}, 2: {ONE}}),
    "in a window": ({"only": TWO}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}, {2: {TWO}}),
    "all": ({}, {}, {0: ALL}),
}


@pytest.mark.parametrize(("case", "kind"), kinds_of(RAISED, "in a window"))
def test_all_ranks_raise_and_name_the_parameters_and_training_can_start_again(
    pool: RankPool, case: str, kind: str
) -> None:
    poison, arguments, named = RAISED[case]
    found = pool.run(3, raise_at, kind, {"at": (4,), **poison}, tuple(named), arguments)
    for message, batches, left, again, finite in found:
        listed = [line.split(": ") for line in message.splitlines() if line.startswith("  ")]
        assert {rank: set(names.split(", ")) for rank, names in listed} == {f"  rank {r}": n for r, n in named.items()}
        assert f"in epoch 0, batch {5 if arguments else 4}:" in message
        assert batches == (5 if arguments else 4)
        assert left == 0.0
        assert (again, finite) == (BATCHES, True)


class Spoils(Poisoned):
    """Makes gradients infinite when backward is over, and nobody's own backward can be blamed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with getattr(self.trainer.strategy, "full_gradients", torch.no_grad)():
            if self.count == 5:
                self.get_parameter(ONE).grad.fill_(math.inf)


def raise_for_a_hook(kind: str) -> tuple[str, int]:
    module = Spoils()
    try:
        run(strategy(kind, nonfinite_grads="raise"), module)
    except NonfiniteGradientError as error:
        return str(error), module.count
    return "nothing was raised", module.count


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_what_no_rank_has_done_is_blamed_on_none(pool: RankPool, kind: str) -> None:
    for message, count in pool.run(2, raise_for_a_hook, kind):
        assert "in epoch 0, batch 4:" in message and "hook" in message
        assert ONE not in message and "rank 0:" not in message
        assert count == 5


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1", "exposed"])
def test_gradients_whose_squares_overflow_are_finite_all_the_same(pool: RankPool, kind: str) -> None:
    poison = {"at": (4,), "only": ONE, "value": 1e30}
    for message, batches, *_ in pool.run(2, raise_at, kind, poison, (0, 1), {}):
        assert message == "nothing was raised"
        assert batches == BATCHES


def raise_with_16_mixed(kind: str) -> tuple[str, int]:
    module = Poisoned()
    trainer = make_trainer(strategy(kind, nonfinite_grads="raise"), use_distributed_sampler=False, fp16=True)
    try:
        trainer.fit(module, big_batch.loader(ranks_batches(BATCHES)[dist.get_rank()]))
    except MisconfigurationException as error:
        return str(error), module.count
    return "nothing was raised", module.count


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_raising_with_16_mixed_is_refused_before_training(pool: RankPool, kind: str) -> None:
    for message, count in pool.run(2, raise_with_16_mixed, kind):
        assert "16-mixed" in message and "skip" in message
        assert count == 0


def propagate(kind: str, arguments: dict[str, Any]) -> tuple[list[int], list[int], float, int]:
    ours = run(strategy(kind, **reading_weights(kind)), Poisoned((4,), only=TWO), **arguments)
    stock = run(DDPStrategy(), Poisoned((4,), only=TWO), **arguments)
    ours_flat, stock_flat = (
        [torch.cat([parameter.reshape(-1) for parameter in one.parameters]) for one in taken] for taken in (ours, stock)
    )
    nans = [[int(one.isnan().sum()) for one in taken] for taken in (ours_flat, stock_flat)]
    # Both have their NaNs where they are counted.
    difference = distance(*([one.nan_to_num() for one in taken] for taken in (ours_flat, stock_flat)))
    return nans[0], nans[1], difference, ours[-1].skipped


@pytest.mark.parametrize(("arguments", "kind"), kinds_of([{}, {"gradient_clip_val": 0.2}]))
def test_nans_spread_as_under_ddp_where_nobody_wants_to_know(
    pool: RankPool, kind: str, arguments: dict[str, Any]
) -> None:
    for ours, stock, difference, skipped in pool.run(2, propagate, kind, arguments):
        assert ours == stock
        assert 0 == stock[3] < stock[4]
        # Clipped by a norm that is NaN, all are so at once.
        assert stock[4] == stock[5] if arguments else stock[4] < stock[5]
        assert difference <= 1e-6
        assert skipped == 0
