"""``ddp_tuned`` is torch's DDP, with the gradients in its buckets, and with buckets that are planned."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core import tuning
from lightning_parstrat.core.tuning_report import TuningReport
from lightning_parstrat.distributed.comm import calibration
from lightning_parstrat.distributed.ddp import bucket_tuner, plan_cache
from lightning_parstrat.distributed.ddp import reducer_buckets as ddp_buckets
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.parity import ddp, largest_difference, make_trainer, train
from tests.strategies.sleeping import CASES, SleepingLayers, slow_wire
from tests.undisturbed import undisturbed


class LookAtWrapper(Callback):
    def __init__(self) -> None:
        self.wrapper: DistributedDataParallel | None = None
        self.shares_memory = False
        self.buckets: list[str] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.wrapper = trainer.strategy.model
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.shares_memory = len(storages) < len(gradients)
        facts = self.wrapper._get_ddp_logging_data()
        self.buckets.append(facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"])


def compare_with_ddp(name: str, module: type[zoo.Zoo]) -> tuple[float, bool, bool, bool]:
    look = LookAtWrapper()
    actual = train(lambda: module(), name, callbacks=[look], gradient_clip_val=0.05)
    difference = largest_difference(actual, train(lambda: module(), ddp(), gradient_clip_val=0.05))
    assert isinstance(look.wrapper, DistributedDataParallel)
    return difference, look.wrapper.gradient_as_bucket_view, look.wrapper.find_unused_parameters, look.shares_memory


def test_it_trains_as_ddp_does_to_the_last_bit(pool: RankPool) -> None:
    assert pool.run(2, compare_with_ddp, "ddp_tuned", zoo.MLP) == [(0.0, True, False, True)] * 2


def test_unused_parameters_are_found_by_flag(pool: RankPool) -> None:
    name = "ddp_tuned_find_unused_parameters_true"
    for difference, as_view, finds_unused, _ in pool.run(2, compare_with_ddp, name, zoo.Unused):
        assert difference == 0.0 and as_view and finds_unused


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it, owners have other attributes."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def whatever_is_measured() -> AbstractContextManager[None]:
    """Within it, other buckets than the default's are tried."""
    return replaced((bucket_tuner, "decide", plan_tiny_buckets), (bucket_tuner, "reason_not_to_plan", lambda *_: None))


def plan_tiny_buckets(problem: Any, cost: Any, *_: Any) -> tuning.Decision:
    """A plan with other buckets than the default's, whatever is measured."""
    default = tuning._plan(problem, None, cost)
    planned = tuning._plan(problem, (200, 40, 800, 100), cost)
    return tuning.Decision(default, planned, 0.0, "tuned", "by a test")


def tune_with_tiny_buckets(
    module: type[zoo.Zoo], flags: dict[str, Any], arguments: dict[str, Any]
) -> tuple[float, int, str]:
    """Difference from ``ddp`` over a whole tuning, how many kinds of buckets there were, and the verdict."""
    look = LookAtWrapper()
    strategy = TunedDDPStrategy(tune_steps=4, tune_tolerance=0.0, partial_window="lightning", **flags)
    samples = 100 * arguments.get("accumulate_grad_batches", 1)
    callbacks = arguments.get("callbacks", [])
    with whatever_is_measured():
        actual = train(lambda: module(), strategy, samples, **{**arguments, "callbacks": [look, *callbacks]})
    expected = train(lambda: module(), DDPStrategy(**flags), samples, **arguments)
    assert strategy.tuning_report is not None
    return largest_difference(actual, expected), len(set(look.buckets)), strategy.tuning_report.verdict


class UsedOnceInAWindow(zoo.MLP):
    """A part of it is used in the first micro-batch of a window alone."""

    def build(self) -> None:
        super().build()
        self.once = nn.Linear(zoo.FEATURES, 5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch)
        return loss + self.once(batch).square().mean() if batch_idx % 3 == 0 else loss


class FrozenInTheMiddle(zoo.MLP):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 9:
            next(self.parameters()).requires_grad_(False)


class SteppedByHand(odd.Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.compute_loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


@pytest.mark.parametrize(
    ("module", "flags", "arguments"),
    [
        (zoo.MLP, {}, {"gradient_clip_val": 0.05}),
        (zoo.MLP, {}, {"accumulate_grad_batches": 2}),
        (zoo.MLP, {}, {"precision": "bf16-mixed"}),
        (zoo.MLP, {}, {"validate": True, "val_check_interval": 3}),
        (zoo.MLP, {"static_graph": True}, {}),
        # torch lets a static graph accumulate only after its first step.
        (
            zoo.MLP,
            {"static_graph": True},
            {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2},
        ),
        (UsedOnceInAWindow, {"find_unused_parameters": True}, {"accumulate_grad_batches": 3}),
        (
            UsedOnceInAWindow,
            {"find_unused_parameters": True, "gradient_as_bucket_view": False},
            {"accumulate_grad_batches": 3},
        ),
        (FrozenInTheMiddle, {"find_unused_parameters": True}, {}),
        (zoo.MLP, {"gradient_as_bucket_view": False}, {}),
        (zoo.BatchNormalised, {}, {}),
        (zoo.Unused, {"find_unused_parameters": True}, {}),
        (zoo.UnusedBySomeRanks, {"find_unused_parameters": True}, {}),
        (odd.SeveralDtypes, {}, {}),
        (SteppedByHand, {}, {}),
        (odd.ReusedUnderCheckpoints, {"static_graph": True}, {}),
    ],
)
def test_parameters_are_those_of_ddp_whatever_buckets_are_tried(
    pool: RankPool, module: type[zoo.Zoo], flags: dict[str, Any], arguments: dict[str, Any]
) -> None:
    for difference, kinds, verdict in pool.run(2, tune_with_tiny_buckets, module, flags, arguments):
        assert difference == 0.0 and kinds > 1
        assert verdict in ("tuned", "default is best")


def test_three_ranks_round_sums_in_another_order_at_most(pool: RankPool) -> None:
    for difference, kinds, _ in pool.run(3, tune_with_tiny_buckets, zoo.MLP, {}, {}):
        assert difference < 1e-5 and kinds > 1


class Tuned(Callback):
    """When tuning was over, and what the steps after it had."""

    def __init__(self) -> None:
        self.over_after = 0
        self.buckets = ""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.strategy.tuning_report is None:
            self.over_after = trainer.global_step
        # A new reducer needs two steps until it is what it will be.
        trainer.should_stop = self.over_after < trainer.global_step - 2
        facts = trainer.strategy.model._get_ddp_logging_data()
        self.buckets = facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]


def tune_sleeping(name: str, steps: int = 30, **arguments: Any) -> tuple[TuningReport | None, int, str]:
    case = CASES[name]
    strategy = TunedDDPStrategy(process_group=slow_wire(case), **{"tune_steps": 4, **arguments})
    tuned = Tuned()
    trainer = make_trainer(strategy, callbacks=[tuned], max_steps=steps, max_epochs=-1)
    trainer.fit(SleepingLayers(case), DataLoader(torch.zeros(steps * dist.get_world_size(), 1)))
    return strategy.tuning_report, tuned.over_after, tuned.buckets


@pytest.mark.parametrize(
    "name",
    slow_unless(
        lambda name: name == "late large tensor", ["many small tensors", "late large tensor", "delay per collective"]
    ),
)
@pytest.mark.alone
@undisturbed
def test_buckets_are_changed_where_that_pays(pool: RankPool, name: str, tmp_path: Path) -> None:
    (report, _, buckets), (of_rank_1, *_) = pool.run(2, tune_sleeping, name)
    # All but what this rank has waited.
    assert replace(of_rank_1, overhead_seconds=report.overhead_seconds) == report
    assert report.verdict == "tuned", report.lines()
    assert buckets == ", ".join(str(bucket.nbytes) for bucket in report.planned_buckets)
    assert len(report.planned_buckets) != len(report.default_buckets)
    predicted = report.predicted_default_seconds - report.predicted_planned_seconds
    assert report.default.seconds - report.planned.seconds > 0.5 * predicted > 0
    off = abs(report.planned.exposed_seconds - report.predicted_planned_seconds)
    assert off <= max(0.25 * report.planned.exposed_seconds, 0.03 * report.planned.seconds), report.lines()
    assert report.bound_seconds <= report.predicted_planned_seconds * (1 + 1e-9)
    assert report.overhead_seconds < 30 * report.default.seconds


def tune_generously(name: str) -> tuple[TuningReport | None, int, str]:
    return tune_sleeping(name, tune_tolerance=0.05)


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [("bandwidth-bound", "bandwidth-bound", "zero1_custom"), ("hidden anyway", "default is best", "less than")],
)
@pytest.mark.alone
@undisturbed
def test_the_default_is_left_alone_where_nothing_is_to_be_gained(
    pool: RankPool, name: str, verdict: str, said: str, tmp_path: Path
) -> None:
    report, over_after, buckets = pool.run(2, tune_generously, name)[0]
    assert (report.verdict, report.caps) == (verdict, None) and said in report.reason
    # Nothing was tried.
    assert over_after == 6 and report.planned is None
    assert buckets == ", ".join(str(bucket.nbytes) for bucket in report.default_buckets)


def tune_by_a_wrong_model(name: str) -> TuningReport | None:
    with whatever_is_measured():
        return tune_sleeping(name)[0]


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_what_turns_out_slower_is_taken_back(pool: RankPool, tmp_path: Path) -> None:
    report = pool.run(2, tune_by_a_wrong_model, "delay per collective")[0]
    assert report.verdict == "default is best" and report.caps is None
    assert report.planned.seconds > report.default.seconds and "when tried" in report.reason


def tune_twice(folder: str, name: str, disturb: Callable[[Path], None] | None) -> list[Any]:
    found = [tune_sleeping(name, plan_cache=folder)]
    dist.barrier()
    if disturb is not None and dist.get_rank() == 0:
        disturb(next(Path(folder).glob("plan-*.json")))
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.append(tune_sleeping(name, plan_cache=folder))
    said = [str(one.message) for one in caught if "the plan in the cache" in str(one.message)]
    return [*found, sorted(path.suffix for path in Path(folder).iterdir()), len(said)]


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_a_later_training_begins_with_the_plan_of_an_earlier_one(pool: RankPool, tmp_path: Path) -> None:
    (first, *_), (again, over_after, buckets), kept, _ = pool.run(
        2, tune_twice, str(tmp_path), "delay per collective", None
    )[0]
    assert again.from_cache and again.verdict == "tuned" and again.caps == first.caps
    # Two steps until buckets have settled, two by default, two that settle, two to compare.
    assert over_after == 8
    assert buckets == ", ".join(str(bucket.nbytes) for bucket in first.planned_buckets)
    assert kept in ([".json", ".png"], [".json"])


def make_slow(path: Path) -> None:
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "caps": [1000]}))


def damage(path: Path) -> None:
    path.write_text(path.read_text()[:100])


@pytest.mark.slow
@pytest.mark.parametrize(("disturb", "warned"), [(make_slow, 0), (damage, 1)])
@pytest.mark.alone
@undisturbed
def test_a_plan_that_is_no_good_any_more_is_made_anew(
    pool: RankPool, tmp_path: Path, disturb: Callable[[Path], None], warned: int
) -> None:
    (first, *_), (again, *_), _, said = pool.run(2, tune_twice, str(tmp_path), "delay per collective", disturb)[0]
    assert not again.from_cache and again.verdict == "tuned" and said == warned
    assert len(again.planned_buckets) < 2 * len(first.planned_buckets)


class AnyOrder(LightningModule):
    """Uses its layers in another order in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(zoo.FEATURES, zoo.FEATURES) for _ in range(12))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index in random.Random(batch_idx).sample(range(len(self.layers)), len(self.layers)):
            batch = self.layers[index](batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fail_on_one_rank(buckets: ddp_buckets.DDPBuckets, caps: tuning.Caps | None) -> None:
    if caps is not None and dist.get_rank() == 1:
        raise MemoryError("no room for buckets")
    adopt(buckets, caps)


def fail_on_rank_1(*arguments: Any) -> Any:
    if dist.get_rank() == 1:
        raise MemoryError("no room for messages")
    return calibration.all_reduce_buffers(*arguments)


adopt = ddp_buckets.DDPBuckets.adopt


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no measurement today")


def is_noise(stability: float, spread: float) -> str | None:
    return tuning.reason_not_to_plan(stability, 1.0)


def is_steady(stability: float, spread: float) -> str | None:
    return tuning.reason_not_to_plan(stability, 0.0)


FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "adopt": [(ddp_buckets.DDPBuckets, "adopt", fail_on_one_rank)],
    "measure": [(bucket_tuner, "all_reduce_cost", fail)],
    "memory": [(bucket_tuner, "all_reduce_buffers", fail_on_rank_1)],
    "decide": [(bucket_tuner, "decide", fail)],
    "save": [(plan_cache.PlanCache, "save", fail)],
    "noise": [(bucket_tuner, "reason_not_to_plan", is_noise)],
    "nothing": [(bucket_tuner, "reason_not_to_plan", is_steady)],
}


def tune_disturbed(module: type[LightningModule], what: str, flags: dict[str, Any]) -> tuple[str, str, int, int]:
    """Verdict and reason, the warnings about it, and how many steps were trained."""
    strategy = TunedDDPStrategy(tune_steps=4, **flags)
    with whatever_is_measured(), replaced(*FAULTS[what]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(module, strategy, 100)
    said = [str(one.message) for one in caught if "ddp_tuned: buckets are not tuned" in str(one.message)]
    report = strategy.tuning_report
    return report.verdict, report.reason, len(said), run.trainer.global_step


@pytest.mark.parametrize(
    ("module", "what", "flags", "reason", "warned"),
    [
        (zoo.MLP, "adopt", {}, "rank 1: MemoryError('no room for buckets')", 1),
        (zoo.MLP, "measure", {}, "RuntimeError: no measurement today", 1),
        (zoo.MLP, "memory", {}, "rank 1: MemoryError('no room for messages')", 1),
        (zoo.MLP, "decide", {}, "rank 0: RuntimeError('no measurement today')", 1),
        (zoo.MLP, "noise", {}, "the times of collectives are noise", 0),
        (AnyOrder, "nothing", {}, "the order in which gradients become ready changes", 0),
        (odd.RepeatedBackward, "nothing", {}, "several backwards", 0),
        (zoo.MLP, "nothing", {"comm_hook": "powersgd"}, "communication hook", 0),
        (zoo.MLP, "nothing", {"ddp_comm_hook": default_hooks.allreduce_hook}, "communication hook", 0),
        (zoo.MLP, "nothing", {"bucket_cap_mb_list": [1.0, 2.0]}, "`bucket_cap_mb_list` was given", 0),
    ],
)
def test_no_fault_in_tuning_ends_a_training(
    pool: RankPool, module: type[LightningModule], what: str, flags: dict[str, Any], reason: str, warned: int
) -> None:
    for rank, (verdict, why, said, steps) in enumerate(pool.run(2, tune_disturbed, module, what, flags)):
        assert verdict == "not tuned" and reason in why
        assert steps == 25 and said == (warned if rank == 0 else 0)


def test_a_plan_that_cannot_be_kept_is_used_all_the_same(pool: RankPool, tmp_path: Path) -> None:
    flags = {"plan_cache": str(tmp_path)}
    for verdict, _, _, steps in pool.run(2, tune_disturbed, zoo.MLP, "save", flags):
        assert verdict in ("tuned", "default is best") and steps == 25


def buckets_of(module: type[zoo.Zoo], bucket_cap_mb: Any, flags: dict[str, Any]) -> str:
    look = LookAtWrapper()
    train(lambda: module(), TunedDDPStrategy(bucket_cap_mb=bucket_cap_mb, **flags), 12, callbacks=[look])
    return look.buckets[-1]


def test_sizes_may_be_given(pool: RankPool) -> None:
    one = pool.run(2, buckets_of, zoo.MLP, 25, {})[0]
    assert "," not in one
    total = int(one)
    small = [int(size) for size in pool.run(2, buckets_of, zoo.MLP, 100 / 2**20, {})[0].split(", ")]
    assert len(small) > 2 and sum(small) == total
    by_list = [small[0] / 2**20, 1.0]
    assert pool.run(2, buckets_of, zoo.MLP, by_list, {})[0] == f"{small[0]}, {total - small[0]}"
    # What is first in the list is sent first, though torch makes buckets from the other end then.
    unused = pool.run(2, buckets_of, zoo.MLP, [100 / 2**20, 1.0], {"find_unused_parameters": True})[0]
    assert unused == f"{small[0]}, {total - small[0]}"


def compressed(name: str | None, hook: Any) -> tuple[float, torch.dtype]:
    flags = {"comm_hook": name} if hook is None else {"ddp_comm_hook": hook}
    actual = train(lambda: zoo.MLP(), TunedDDPStrategy(**flags), 40)
    gradient = next(actual.module.parameters())
    return largest_difference(actual, train(lambda: zoo.MLP(), ddp(), 40)), gradient.dtype


@pytest.mark.parametrize(("name", "hook"), [("bf16", None), ("fp16", None), (None, default_hooks.fp16_compress_hook)])
def test_hooks_compress_on_every_device(pool: RankPool, name: str | None, hook: Any) -> None:
    for difference, dtype in pool.run(2, compressed, name, hook):
        assert 0.0 < difference < 2e-2 and dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": "small"}, "Must be 'auto', a positive number"),
        ({"bucket_cap_mb": []}, "Must be 'auto', a positive number"),
        ({"bucket_cap_mb": [1.0, -1.0]}, "Must be 'auto', a positive number"),
        ({"tune_steps": 1}, "Must be a whole number >= 2"),
        ({"tune_tolerance": 1.0}, "Must be a number >= 0 and < 1"),
        ({"plan_cache": 3}, "plan_cache: 3. Must be a folder's path, or None"),
        ({"plan_cache": True}, "Must be a folder's path"),
        ({"plan_cache": ["plans"]}, "Must be a folder's path"),
        ({"plan_cache": "~nobody-of-that-name/plans"}, "There is no such user"),
        ({"bucket_cap_mb": 8, "bucket_cap_mb_list": [1.0]}, "Give one of them"),
        ({"comm_hook": "int8"}, r"Must be one of \('bf16', 'fp16', 'powersgd'\)"),
        ({"comm_hook": "bf16", "ddp_comm_hook": default_hooks.allreduce_hook}, "Give one of them"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TunedDDPStrategy(**arguments)


def test_there_is_no_report_before_there_was_a_training(tmp_path: Path) -> None:
    strategy = TunedDDPStrategy()
    assert strategy.tuning_report is None
    with pytest.raises(ValueError, match="no training has been tuned to the end"):
        strategy.save_tuning_report(tmp_path)


def save_report(folder: str) -> list[str]:
    case = CASES["bandwidth-bound"]
    strategy = TunedDDPStrategy(process_group=slow_wire(case), tune_steps=2, tune_tolerance=0.1)
    trainer = make_trainer(strategy, callbacks=[Tuned()], max_steps=20, max_epochs=-1)
    trainer.fit(SleepingLayers(case), DataLoader(torch.zeros(40, 1)))
    if dist.get_rank() == 0:
        strategy.save_tuning_report(folder)
    return strategy.tuning_report.lines()


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_the_report_is_saved_as_it_is_told(pool: RankPool, tmp_path: Path) -> None:
    lines = pool.run(2, save_report, str(tmp_path))[0]
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["verdict"] == "bandwidth-bound" and saved["reason"] in lines[0]
    assert TuningReport.from_json(saved).lines() == lines
