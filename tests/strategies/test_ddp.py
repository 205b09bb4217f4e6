"""``ddp_tuned`` is torch's DDP, with the gradients in its buckets, and with buckets whose size was tried."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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

# What users measure with is what the tests train.
from benchmarks.bucketing import Case, SleepingLayers
from benchmarks.slow_wire import SlowWire
from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core.tuning import TuningReport
from lightning_parstrat.distributed.ddp import bucket_tuner, reducers
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import plain_sgd
from tests.strategies.parity import largest_difference, make_trainer, train
from tests.undisturbed import undisturbed


class LookAtWrapper(Callback):
    def __init__(self) -> None:
        self.shares_memory = False
        self.buckets: list[str] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        # The smallest buckets that are tried have a gradient each.
        self.shares_memory |= len(storages) < len(gradients)
        facts = trainer.strategy.model._get_ddp_logging_data()
        self.buckets.append(facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"])


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it, owners have other attributes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for replacement in replacements:
            monkeypatch.setattr(*replacement)
        yield


def tiny_sizes() -> AbstractContextManager[None]:
    """Within it, sizes are tried that even the zoo's modules have several buckets of."""
    return replaced((bucket_tuner, "sizes_to_try", lambda *_: [100, 800]))


def tune_with_tiny_buckets(
    module: type[zoo.Zoo], flags: dict[str, Any], arguments: dict[str, Any]
) -> tuple[float, int, str]:
    """Difference from ``ddp`` over a whole tuning, how many kinds of buckets there were, and the verdict."""
    look = LookAtWrapper()
    strategy = TunedDDPStrategy(tune_steps=2, tune_tolerance=0.0, partial_window="lightning", **flags)
    samples = 100 * arguments.get("accumulate_grad_batches", 1)
    callbacks = [make() for make in arguments.get("callbacks", [])]
    with tiny_sizes():
        actual = train(lambda: module(), strategy, samples, **{**arguments, "callbacks": [look, *callbacks]})
    callbacks = [make() for make in arguments.get("callbacks", [])]
    expected = train(lambda: module(), DDPStrategy(**flags), samples, **{**arguments, "callbacks": callbacks})
    assert strategy.tuning_report is not None
    # Views into buckets save a copy of all gradients.
    assert look.shares_memory == flags.get("gradient_as_bucket_view", True)
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


class SteppedByHand(zoo.StepsByHand, zoo.MLP):
    pass


TRIED: dict[str, tuple[type[zoo.Zoo], dict[str, Any], dict[str, Any]]] = {
    "clipped": (zoo.MLP, {}, {"gradient_clip_val": 0.05}),
    "accumulated": (zoo.MLP, {}, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (zoo.MLP, {}, {"precision": "bf16-mixed"}),
    "validated": (zoo.MLP, {}, {"validate": True, "val_check_interval": 3}),
    "static": (zoo.MLP, {"static_graph": True}, {}),
    # torch lets a static graph accumulate only after its first step.
    "static, accumulated": (
        zoo.MLP,
        {"static_graph": True},
        {"callbacks": [partial(GradientAccumulationScheduler, {0: 1, 1: 2})], "max_epochs": 2},
    ),
    "used once": (UsedOnceInAWindow, {"find_unused_parameters": True}, {"accumulate_grad_batches": 3}),
    "used once, no views": (
        UsedOnceInAWindow,
        {"find_unused_parameters": True, "gradient_as_bucket_view": False},
        {"accumulate_grad_batches": 3},
    ),
    "frozen": (FrozenInTheMiddle, {"find_unused_parameters": True}, {}),
    "no views": (zoo.MLP, {"gradient_as_bucket_view": False}, {}),
    "batch norm": (zoo.BatchNormalised, {}, {}),
    "unused": (zoo.Unused, {"find_unused_parameters": True}, {}),
    "unused by some": (zoo.UnusedBySomeRanks, {"find_unused_parameters": True}, {}),
    "several dtypes": (odd.SeveralDtypes, {}, {}),
    "by hand": (SteppedByHand, {}, {}),
    "reused under checkpoints": (odd.ReusedUnderCheckpoints, {"static_graph": True}, {}),
}


QUICK = ["clipped", "accumulated", "static", "used once", "several dtypes"]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, TRIED))
def test_parameters_are_those_of_ddp_whatever_buckets_are_tried(pool: RankPool, name: str) -> None:
    for difference, kinds, verdict in pool.run(2, tune_with_tiny_buckets, *TRIED[name]):
        assert difference == 0.0 and kinds > 1 and verdict in ("tuned", "default is best")


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


# Layers sleep, on an emulated network: what buckets gain there is known.
SLEEPING = {
    "late large tensor": Case([600_000, *[20_000] * 20], 0.04, 1e-3, 1.6e-8, by_size=False),
    "hidden anyway": Case([10_000] * 10, 0.05, 2e-3, 1e-9),
}


def tune_sleeping(name: str, arguments: dict[str, Any]) -> tuple[TuningReport, int, list[int]]:
    """What was found, after how many steps, and the bytes of the buckets then."""
    case = SLEEPING[name]
    slow: Any = SlowWire(dist.group.WORLD, case.latency_seconds, case.seconds_per_byte)
    strategy = TunedDDPStrategy(process_group=slow, tune_steps=4, **arguments)
    tuned = Tuned()
    trainer = make_trainer(strategy, callbacks=[tuned], max_steps=60, max_epochs=-1)
    trainer.fit(SleepingLayers(case), DataLoader(torch.zeros(60 * dist.get_world_size(), 1)))
    assert strategy.tuning_report is not None
    return strategy.tuning_report, tuned.over_after, [int(size) for size in tuned.buckets.split(", ")]


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_buckets_are_changed_where_that_pays(pool: RankPool, tmp_path: Path) -> None:
    (report, over_after, buckets), (of_rank_1, *_) = pool.run(2, tune_sleeping, "late large tensor", {})
    assert of_rank_1 == report and report.verdict == "tuned", str(report)
    seconds = dict(report.tried)
    assert report.cap is not None and seconds[report.cap] < seconds[None]
    # The default sends 1 MiB, and then all the rest together.
    assert len(buckets) > 1 and max(buckets) - report.cap < 2_400_000
    assert over_after == report.steps
    # The log has the size and its gain in one line, and what was printed has all that was tried.
    assert "MiB gains" in report.headline and str(report).count(": forward and backward") == len(report.tried)


@pytest.mark.slow
@pytest.mark.alone
@undisturbed
def test_the_default_is_left_alone_where_nothing_is_to_be_gained(pool: RankPool, tmp_path: Path) -> None:
    report, _, buckets = pool.run(2, tune_sleeping, "hidden anyway", {"tune_tolerance": 0.1})[0]
    assert (report.verdict, report.cap) == ("default is best", None) and "instead of" in report.reason
    assert buckets == [400_000]


def tune_twice(folder: str, disturb: Callable[[Path], None] | None) -> list[Any]:
    found = [tune_sleeping("late large tensor", {"plan_cache": folder})]
    dist.barrier()
    if disturb is not None and dist.get_rank() == 0:
        disturb(next(Path(folder).glob("plan-*.json")))
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.append(tune_sleeping("late large tensor", {"plan_cache": folder}))
    return [*found, sum("the plan in the cache" in str(one.message) for one in caught)]


def damage(path: Path) -> None:
    path.write_text("nothing")


@pytest.mark.slow
@pytest.mark.parametrize(("disturb", "warned"), [(None, 0), (damage, 1)])
@pytest.mark.alone
@undisturbed
def test_a_later_training_begins_with_the_plan_of_an_earlier_one(
    pool: RankPool, tmp_path: Path, disturb: Callable[[Path], None] | None, warned: int
) -> None:
    (first, *_), (again, over_after, buckets), said = pool.run(2, tune_twice, str(tmp_path), disturb)[0]
    assert again.verdict == "tuned" and again.from_cache == (disturb is None) and said == warned
    if disturb is None:
        assert again.cap == first.cap
        # Until the first buckets have settled.
        assert over_after == 2
    else:
        # One that cannot be read is searched anew.
        assert len(buckets) > 1
    assert len(list(tmp_path.iterdir())) == 1


exchange = reducers._exchange


def fail_on_one_rank(ddp: DistributedDataParallel, *arguments: Any) -> None:
    if arguments[-1] in (100, 800) and dist.get_rank() == 1:
        raise MemoryError("no room for buckets")
    exchange(ddp, *arguments)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no measurement today")


class OneParameter(zoo.MLP):
    def build(self) -> None:
        self.net = nn.Linear(zoo.FEATURES, 1, bias=False)


Faults = list[tuple[Any, str, Any]]
NOT_TUNED: list[tuple[type[LightningModule], Faults, dict[str, Any], str, int]] = [
    (zoo.MLP, [(reducers, "_exchange", fail_on_one_rank)], {}, "rank 1: MemoryError('no room for buckets')", 1),
    (zoo.MLP, [(bucket_tuner, "verdict_on", fail)], {}, "RuntimeError: no measurement today", 1),
    (odd.RepeatedBackward, [], {}, "several backwards", 0),
    (partial(odd.Sparse, plain_sgd), [], {}, "sparse gradients", 0),
    (OneParameter, [], {}, "fewer than two parameters", 0),
    (zoo.MLP, [], {"ddp_comm_hook": default_hooks.allreduce_hook}, "communication hook", 0),
    (zoo.MLP, [], {"bucket_cap_mb_list": [1.0, 2.0]}, "`bucket_cap_mb_list` was given", 0),
]


def tune_disturbed(module: type[LightningModule], faults: Faults, flags: dict[str, Any]) -> tuple[str, str, int, int]:
    """Verdict and reason, the warnings about it, and how many steps were trained."""
    strategy = TunedDDPStrategy(tune_steps=2, **flags)
    with tiny_sizes(), replaced(*faults), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(module, strategy, 100)
    said = [str(one.message) for one in caught if "ddp_tuned: buckets are not tuned" in str(one.message)]
    report = strategy.tuning_report
    return report.verdict, report.reason, len(said), run.trainer.global_step


def tune_all_disturbed(rows: slice) -> list[tuple[str, str, int, int]]:
    return [tune_disturbed(*row[:3]) for row in NOT_TUNED[rows]]


@pytest.mark.parametrize("rows", [slice(0, 4), pytest.param(slice(4, None), marks=pytest.mark.slow)])
def test_no_fault_in_tuning_ends_a_training(pool: RankPool, rows: slice) -> None:
    for rank, found in enumerate(pool.run(2, tune_all_disturbed, rows, timeout=200.0)):
        for (verdict, why, said, steps), (*_, reason, warned) in zip(found, NOT_TUNED[rows], strict=True):
            assert verdict == "not tuned" and reason in why
            assert steps == 25 and said == (warned if rank == 0 else 0), reason


def test_a_plan_that_cannot_be_kept_is_used_all_the_same(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = {"plan_cache": str(tmp_path / "file" / "below")}
    for verdict, _, _, steps in pool.run(2, tune_disturbed, zoo.MLP, [], flags):
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
