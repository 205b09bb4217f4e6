"""Groups that train alone and meet: against DiLoCo written out for one process, with files, signals and lost groups."""

import copy
import os
import re
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.core.footprint import Training, outer
from lightning_parstrat.distributed.comm.means import dequantized, quantized
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY
from tests.comparing import assert_same, distance
from tests.pool import RankError, RankPool
from tests.strategies import odd, zoo
from tests.strategies.cases import adafactor, plain_sgd
from tests.strategies.parity import Looks, ddp, largest_difference, looks_at_no_gradient, make_trainer, train, zero1
from tests.strategies.test_report import listening

SAMPLES, BATCH, EVERY = 40, 4, 3
OUTER = {"outer_every": EVERY, "outer_lr": 0.7, "outer_momentum": 0.9}


def compare_to_ddp() -> float:
    alone = zero1(shard_group=2, outer_every=1, outer_lr=1.0, outer_momentum=0.0)
    make = partial(zoo.MLP, plain_sgd)
    return largest_difference(train(make, alone), train(make, ddp()))


def test_groups_that_meet_after_each_step_of_sgd_train_as_ddp_does(pool: RankPool) -> None:
    assert all(one <= 2e-6 for one in pool.run(4, compare_to_ddp))


class Case(NamedTuple):
    """A training in groups of one or two ranks, and how far it may be from one process that plays all groups."""

    module: type[zoo.Zoo] = zoo.MLP
    optimizer: Any = zoo.adamw
    trainer: dict[str, Any] = {}  # noqa: RUF012
    strategy: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 2e-5


CASES = {
    "adamw": Case(),
    "sgd": Case(optimizer=plain_sgd, tolerance=2e-6),
    "without momentum": Case(optimizer=plain_sgd, strategy={"outer_momentum": 0.0, "outer_lr": 1.0}, tolerance=2e-6),
    "accumulated": Case(optimizer=plain_sgd, trainer={"accumulate_grad_batches": 2}, tolerance=2e-6),
    "zero2, accumulated": Case(zoo.MLP, plain_sgd, {"accumulate_grad_batches": 2}, {"shard_gradients": True}, 2e-6),
    "whole parameters": Case(zoo.Convolutional, adafactor, trainer={"precision": "64-true"}, tolerance=1e-9),
    "frozen": Case(zoo.Unused),
    "bf16": Case(strategy={"outer_dtype": "bf16"}, tolerance=2e-2),
    "int8": Case(strategy={"outer_dtype": "int8"}, tolerance=4e-2),
}


TRAININGS = [(name, 2, 1) for name in CASES] + [
    *(("adamw", 4, 2), ("int8", 4, 2), ("whole parameters", 4, 2)),
    *(("sgd", 3, 1), ("int8", 3, 1)),
]


def fit(case: Case, size: int, **arguments: Any) -> tuple[dict[str, Tensor], list[list[str]]]:
    """The parameters after a training in groups, and the names in each bucket."""
    looks = Looks(lambda trainer: trainer.strategy._engine.plan)
    strategy = zero1(shard_group=size, bucket_cap_mb=2e-4, **{**OUTER, **case.strategy})
    run = train(lambda: case.module(case.optimizer), strategy, callbacks=[looks], **case.trainer, **arguments)
    return {name: one.detach().clone() for name, one in run.module.named_parameters()}, looks.seen


def copy_of(module: LightningModule, name: str) -> Tensor:
    return module.get_parameter(name).detach().clone()


def play(case: Case, size: int, plan: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """DiLoCo in one process, a module for each group: the bucket at place i of n meets i / n of a round earlier.

    What groups send after a step arrives after the next one.
    """
    options = {**OUTER, **case.strategy}
    torch.manual_seed(0)
    first = case.module(case.optimizer)
    dtype = torch.float64 if "precision" in case.trainer else torch.float32
    first.to(dtype)
    world, accumulate = dist.get_world_size(), case.trainer.get("accumulate_grad_batches", 1)
    modules = [copy.deepcopy(first) for _ in range(world // size)]
    optimizers = [module.configure_optimizers() for module in modules]
    loaders = [zoo.loader(SAMPLES * world, BATCH, dtype, rank, world) for rank in range(world)]
    by_rank = [list(loader) for loader in loaders]
    held = {name: one.detach().clone() for name, one in first.named_parameters()}
    momenta = {name: torch.zeros_like(one) for name, one in held.items()}
    in_meeting: dict[str, list[Tensor]] = {}
    apart: set[str] = set()

    def meet(sent: dict[str, list[Tensor]]) -> None:
        """Groups keep what they have stepped since it was sent."""
        for name, of_groups in sent.items():
            moved = torch.stack([held[name] - one for one in of_groups]).mean(0)
            momenta[name].mul_(options["outer_momentum"]).add_(moved)
            held[name] -= options["outer_lr"] * (moved + options["outer_momentum"] * momenta[name])
            for module, before in zip(modules, of_groups, strict=True):
                parameter = module.get_parameter(name).data
                parameter.copy_(held[name] + (parameter - before))
        sent.clear()

    steps = len(by_rank[0]) // accumulate
    for step in range(1, steps + 1):
        for group, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            for micro in range((step - 1) * accumulate, step * accumulate):
                batch = torch.cat([batches[micro] for batches in by_rank[group * size : (group + 1) * size]])
                (module.training_step(batch, micro) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
        meet(in_meeting)
        apart.update(name for names in plan for name in names)
        for place, names in enumerate(plan):
            if (step + place * EVERY // len(plan)) % EVERY == 0:
                in_meeting.update({name: [copy_of(module, name) for module in modules] for name in names})
                apart.difference_update(names)
    meet(in_meeting)
    meet({name: [copy_of(module, name) for module in modules] for name in apart})
    return held


def compare_to_play(name: str, size: int) -> tuple[float, dict[str, Tensor]]:
    case = CASES[name]
    parameters, plan = fit(case, size)
    assert len(plan) > 1
    expected = play(case, size, plan)
    scale = max(float(one.abs().max()) for one in expected.values())
    return distance(parameters, {key: expected[key] for key in parameters}) / scale, parameters


@pytest.mark.parametrize(("name", "ranks", "size"), TRAININGS)
def test_groups_train_as_written_out(pool: RankPool, name: str, ranks: int, size: int) -> None:
    found = pool.run(ranks, compare_to_play, name, size)
    for difference, parameters in found:
        assert difference <= CASES[name].tolerance
        assert_same(parameters, found[0][1])


def test_eight_bits_are_off_by_half_a_step_of_the_largest_and_show_nan() -> None:
    values = torch.randn(3, 1024) * torch.logspace(-6, 6, 1024)
    largest = values.view(3, -1, 256).abs().amax(2, keepdim=True)
    error = (dequantized(quantized(values)) - values).view(3, -1, 256).abs()
    assert (error <= largest / 254 * 1.001).all()
    for bad in (float("nan"), float("inf")):
        values[1, 3] = bad
        assert not dequantized(quantized(values))[1, :256].isfinite().any()
    assert not dequantized(quantized(torch.zeros(1, 256))).any()


@looks_at_no_gradient
class Sent(Callback):
    """The bytes of pieces that this rank has sent to other groups so far, after each step. Means are as large."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.bytes.append(2 * trainer.strategy._meetings._outer.sums.bytes_sent)


def sent_in_a_round(size: int) -> tuple[float, float]:
    """Bytes that a rank sends to other groups in a round, and what is planned."""
    sent, world = Sent(), dist.get_world_size()
    run = train(zoo.MLP, zero1(shard_group=size, **OUTER), callbacks=[sent])
    count = sum(one.numel() for one in run.module.parameters())
    training = Training(parameters=count, nodes=world // size, devices=size, shard_ranks=size)
    planned = EVERY * (outer(training, EVERY).sent - outer(training, 10**9).sent)
    return sent.bytes[3 * EVERY - 1] - sent.bytes[2 * EVERY - 1], planned


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2)])
def test_groups_send_what_is_planned(pool: RankPool, ranks: int, size: int) -> None:
    for sent, planned in pool.run(ranks, sent_in_a_round, size):
        # Shards are padded.
        assert 0.99 * planned <= sent <= 1.15 * planned


@looks_at_no_gradient
class Notes(Callback):
    """Notes what a validation sees, and each step's parameters."""

    def __init__(self) -> None:
        self.validated: list[list[Tensor]] = []
        self.steps: list[list[Tensor]] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append([one.detach().clone() for one in pl_module.parameters()])

    on_train_end = on_validation_start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.steps.append([one.detach().clone() for one in pl_module.parameters()])


def train_and_save(folder: str, size: int, every: int | None = None, **arguments: Any) -> tuple[Any, ...]:
    """Trains ten steps with a validation and a save after the seventh. What was seen, and the last parameters."""
    torch.manual_seed(3)
    notes, world = Notes(), dist.get_world_size()
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    resumes = {"ckpt_path": arguments.pop("ckpt_path", None)}
    trainer = make_trainer(
        zero1(shard_group=size, **{**OUTER, "outer_every": every or EVERY}),
        callbacks=[notes, save, *arguments.pop("callbacks", [])],
        enable_checkpointing=True,
        val_check_interval=7,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        max_epochs=None,
        max_steps=10,
        **arguments,
    )
    module = zoo.BatchNormalised()
    trainer.fit(
        module, zoo.loader(SAMPLES * world, 4, rank=dist.get_rank(), world_size=world), zoo.loader(8, 4), **resumes
    )
    last = {name: one.clone() for name, one in module.state_dict().items()}
    return last, notes.validated, notes.steps


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2)])
def test_a_resumed_training_ends_with_the_same_bits(pool: RankPool, tmp_path: Path, ranks: int, size: int) -> None:
    whole = pool.run(ranks, train_and_save, str(tmp_path), size)
    (path,) = tmp_path.glob("*.ckpt")
    resumed = pool.run(ranks, partial(train_and_save, ckpt_path=str(path)), str(tmp_path / "again"), size)
    for (last, validated, _), (again, *_) in zip(whole, resumed, strict=True):
        assert_same(again, last)
        assert_same(last, whole[0][0])
        # Every rank has evaluated the same parameters, and the file has them.
        assert_same(validated, whole[0][1])
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_same([saved[name] for name, _ in zoo.BatchNormalised().named_parameters()], whole[0][1][0])
    # Groups were apart before.
    assert distance(whole[0][2][4], whole[size][2][4]) > 1e-4


def test_a_checkpoint_resumes_with_another_number_of_groups_and_under_another_flag(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(4, train_and_save, str(tmp_path), 2)
    (path,) = tmp_path.glob("*.ckpt")
    (alone,) = pool.run(1, partial(train_and_save, ckpt_path=str(path)), str(tmp_path / "one"), 1)
    saved = torch.load(path, weights_only=True)["state_dict"]
    before = {name: saved[name] for name, _ in zoo.BatchNormalised().named_parameters()}
    assert 1e-6 < distance({name: alone[0][name] for name in before}, before) < 1
    found = pool.run(4, partial(train_and_save, ckpt_path=str(path)), str(tmp_path / "four"), 1)
    for last, *_ in found:
        assert_same(last, found[0][0])
    for last in pool.run(2, resume_by_ddp, str(path)):
        assert 1e-6 < distance({name: last[name] for name in before}, before) < 1


def resume_by_ddp(path: str) -> dict[str, Tensor]:
    trainer, module = make_trainer(ddp(), max_epochs=2), zoo.BatchNormalised()
    trainer.fit(module, zoo.loader(SAMPLES * 2, 4, rank=dist.get_rank(), world_size=2), ckpt_path=path)
    return module.state_dict()


def train_together_then_alone(folder: str) -> float:
    """Post-local SGD: the largest difference to six steps together, and then the mean of four of each rank alone."""
    make, world = partial(zoo.MLP, plain_sgd), dist.get_world_size()

    def fit(strategy: Any, steps: int, path: str | None = None) -> LightningModule:
        torch.manual_seed(0)
        module = make()
        saves = ModelCheckpoint(folder, filename="first", every_n_train_steps=6)
        callbacks = [] if path else [saves]
        trainer = make_trainer(strategy, max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(callbacks))
        data = zoo.loader(SAMPLES * world, BATCH, rank=dist.get_rank(), world_size=world)
        trainer.fit(module, data, ckpt_path=path)
        return module

    together = fit(zero1(), 6)
    expected = copy.deepcopy(together)
    optimizer = expected.configure_optimizers()
    for batch in list(zoo.loader(SAMPLES * world, BATCH, rank=dist.get_rank(), world_size=world))[6:]:
        expected.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in expected.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world
    alone = zero1(shard_group=1, outer_every=1000, outer_lr=1.0, outer_momentum=0.0)
    return distance(list(fit(alone, 10, f"{folder}/first.ckpt").parameters()), list(expected.parameters()))


def test_ranks_train_together_and_then_alone(pool: RankPool, tmp_path: Path) -> None:
    for difference in pool.run(2, train_together_then_alone, str(tmp_path)):
        assert difference <= 1e-6


@looks_at_no_gradient
class Sleeps(Callback):
    """One rank sleeps within a step; notes when each step ends."""

    def __init__(self, rank: int, step: int, seconds: float) -> None:
        self.rank, self.step, self.seconds = rank, step, seconds
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step and trainer.global_rank == self.rank:
            time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.times.append(time.monotonic())


def times_of_steps(seconds: float) -> list[float]:
    sleeps = Sleeps(1, 2, seconds)
    # One bucket meets at once.
    train(zoo.MLP, ZeRO1Strategy(shard_group=1, outer_every=8), callbacks=[sleeps])
    return [time - sleeps.times[0] for time in sleeps.times]


def test_a_group_that_sleeps_is_waited_for_at_the_meeting_alone(pool: RankPool) -> None:
    times, _ = pool.run(2, times_of_steps, 3.0)
    assert times[6] < 1.5
    assert times[7] > 2.5


class Ends(Callback):
    """One rank gets a signal to end within a step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_signal(folder: str) -> tuple[str, int, list[str]]:
    save = ModelCheckpoint(folder, save_last=True, filename="none", every_n_train_steps=10**6)
    trainer = make_trainer(zero1(shard_group=1, **OUTER), callbacks=[Ends(), save], enable_checkpointing=True)
    with listening() as lines:
        try:
            trainer.fit(zoo.MLP(), zoo.loader(SAMPLES * 2, 4, rank=dist.get_rank(), world_size=2))
        except SystemExit as end:
            return str(end.code), trainer.global_step, lines
    return "", trainer.global_step, lines


def test_a_signal_is_answered_at_the_next_meeting(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, train_until_signal, str(tmp_path))
    for code, step, _ in found:
        assert (code, step) == (str(128 + signal.SIGTERM), 6)
    assert any("The training is saved when groups meet, after 2 more steps" in line for line in found[0][2])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


class Taught(zoo.MLP):
    """A teacher that no optimizer has follows the student."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(zoo.FEATURES, 33).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for one, student in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            one.data.lerp_(student.detach(), 0.5)


class Unannounced(zoo.MLP):
    """Manual optimization with a backward that Lightning does not know of."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()


SPREADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a teacher": (Taught, {}),
    "clamped, after a meeting, too": (odd.SwappedData, {"max_steps": 6}),
    "plain backward": (Unannounced, {}),
    "two optimizers": (zoo.Adversarial, {}),
    "bf16 parameters": (zoo.MLP, {"precision": "bf16-true"}),
}


def train_in_groups(name: str) -> list[Tensor]:
    make, arguments = SPREADS[name]
    return [one.detach() for one in train(make, zero1(shard_group=1, **OUTER), **arguments).module.parameters()]


@pytest.mark.parametrize("name", SPREADS)
def test_all_ranks_end_with_the_same_parameters(pool: RankPool, name: str) -> None:
    found = pool.run(2, train_in_groups, name)
    assert_same(found[1], found[0])


def search_and_train(folder: str) -> float:
    """How far parameters are from where they began, after a search for a learning rate."""
    search = LearningRateFinder(min_lr=1e-3, max_lr=3.0, num_training_steps=20, update_attr=False)
    torch.manual_seed(0)
    module = zoo.MLP(partial(torch.optim.SGD, lr=1e-6))
    module.lr = 1e-6
    before = [one.detach().clone() for one in module.parameters()]
    trainer = make_trainer(zero1(shard_group=1, **OUTER), callbacks=[search], default_root_dir=folder)
    trainer.fit(module, zoo.loader(SAMPLES * 2, BATCH, rank=dist.get_rank(), world_size=2))
    return distance(list(module.parameters()), before)


def test_a_search_for_a_learning_rate_leaves_nothing(pool: RankPool, tmp_path: Path) -> None:
    assert all(0 < moved < 1e-4 for moved in pool.run(2, search_and_train, str(tmp_path)))


class SavesFirst(Callback):
    """Saves before the first step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/again.ckpt")
        trainer.save_checkpoint(f"{self.folder}/weights.ckpt", weights_only=True)


class Scale(Callback):
    """The loss scale at the begin."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found = trainer.precision_plugin.scaler.get_scale()  # type: ignore[attr-defined]


def scale_at_begin(folder: str, path: str | None) -> float:
    scale = Scale()
    own = {"fp16": True, "init_scale": 128.0 * (1 + dist.get_rank())}
    train_and_save(folder, 1, ckpt_path=path, callbacks=[scale], **own)
    return scale.found


def test_each_group_resumes_with_its_loss_scale(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, scale_at_begin, str(tmp_path), None) == [128.0, 256.0]
    (path,) = tmp_path.glob("*.ckpt")
    assert pool.run(2, scale_at_begin, str(tmp_path / "again"), str(path)) == [512.0, 1024.0]


def resume_and_save(folder: str, path: str) -> None:
    train_and_save(folder, 1, ckpt_path=path, callbacks=[SavesFirst(folder)])


def test_a_save_before_the_first_step_of_a_resumed_training_has_the_momentum(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, str(tmp_path), 1)
    (path,) = tmp_path.glob("*.ckpt")
    pool.run(2, resume_and_save, str(tmp_path / "again"), str(path))
    first, again = (torch.load(one, weights_only=True)[CHECKPOINT_KEY] for one in (path, tmp_path / "again/again.ckpt"))
    assert first["outer"]["momenta"] and first["outer"]["step"] == 7
    assert_same(again["outer"], first["outer"])
    assert "outer" not in torch.load(tmp_path / "again/weights.ckpt", weights_only=True)[CHECKPOINT_KEY]


class Raises(Callback):
    """Ranks raise in different steps, and a callback saves then."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4 + trainer.global_rank:
            raise KeyError("by the program")


def save_after_exceptions(folder: str) -> list[str]:
    saves = OnExceptionCheckpoint(folder)
    strategy = zero1(shard_group=1, **{**OUTER, "outer_every": 8}, bucket_cap_mb=25)
    with pytest.raises(KeyError):
        train(zoo.MLP, strategy, callbacks=[Raises(), saves], enable_checkpointing=True)
    return [one.name for one in Path(folder).iterdir()]


def test_nothing_is_saved_if_groups_stop_after_different_steps(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, save_after_exceptions, str(tmp_path)) == [[], []]


def train_after_exceptions() -> None:
    with pytest.raises(KeyError):
        train(zoo.MLP, zero1(shard_group=1, **OUTER), callbacks=[Raises()])
    train(zoo.MLP, zero1(shard_group=1, **OUTER))


def test_processes_that_stopped_within_a_meeting_train_no_more(pool: RankPool) -> None:
    with pytest.raises(RankError, match="ended while groups were meeting"):
        pool.run(2, train_after_exceptions)


class Diverges(zoo.MLP):
    """The learning rate of one rank is too large, or infinite."""

    factor = 1e3

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) * (self.factor if dist.get_rank() == 2 else 1.0)


class Explodes(Diverges):
    factor = float("inf")


class OneElement(zoo.MLP):
    """One element of a rank's gradients is infinite."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2 and dist.get_rank() >= 2:
            self.net[0].weight.data[0, 0] = float("inf")


def train_with_an_infinity() -> None:
    train(OneElement, zero1(shard_group=2, **{**OUTER, "outer_every": 6}))


def test_an_infinity_in_a_part_of_a_group_ends_all_ranks(pool: RankPool) -> None:
    with pytest.raises(RankError, match=re.escape("group 1 (ranks 2, 3) has parameters that are not finite")):
        pool.run(4, train_with_an_infinity)


def train_apart(cls: type[zoo.Zoo], folder: str) -> list[str]:
    logger = CSVLogger(folder, name="", version="")
    make = partial(cls, partial(torch.optim.SGD, lr=1e-4))
    with listening() as lines:
        train(make, zero1(shard_group=1, **OUTER), logger=logger, samples_per_rank=12)
    return lines


def test_how_far_each_group_moves_is_logged_and_one_that_diverges_is_named(pool: RankPool, tmp_path: Path) -> None:
    lines = pool.run(3, train_apart, Diverges, str(tmp_path))
    assert any("group 2 (rank 2) moves more than 10 times as far" in line for line in lines[0])
    logged = (tmp_path / "metrics.csv").read_text()
    assert all(f"outer_norm/group_{group}" in logged for group in range(3))
    with pytest.raises(RankError, match=re.escape("group 2 (rank 2) has parameters that are not finite after step 3")):
        pool.run(3, train_apart, Explodes, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_every": 0, "shard_group": 1}, "Invalid outer_every: 0. Must be a whole number of steps"),
        ({"outer_every": 5, "outer_lr": -1, "shard_group": 1}, "Invalid outer_lr: -1. Must be a positive number"),
        ({"outer_every": 5, "outer_momentum": 1, "shard_group": 1}, "Invalid outer_momentum: 1. Must be a number in"),
        ({"outer_every": 5, "outer_dtype": "fp4", "shard_group": 1}, "Must be one of ('bf16', 'int8', None)."),
        ({"outer_every": 5}, "Set shard_group='node', or a number of ranks."),
        ({"outer_lr": 0.5}, "have no effect without outer_every. Set it, such as outer_every=50."),
        ({"outer_every": 5, "shard_group": 1, "state_dict_type": "sharded"}, "needs state_dict_type='full'"),
        ({"outer_every": 5, "shard_group": 1, "rank_shares": [1, 2]}, "outer_every needs rank_shares='equal'"),
        ({"outer_every": 5, "shard_group": 1, "keep_global_batch": True}, "outer_every needs keep_global_batch=False"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ZeRO1Strategy(**arguments)


def train_refused(name: str) -> None:
    strategy = zero1(shard_group=1, **OUTER)
    if name == "stream":
        make_trainer(strategy).fit(zoo.MLP(), DataLoader(zoo.Stream(zoo.Samples(8).data), batch_size=2))
    elif name in ("ema", "swa"):
        average = EMAWeightAveraging() if name == "ema" else StochasticWeightAveraging(swa_lrs=0.1)
        train(zoo.MLP, strategy, callbacks=[average])
    elif name == "16 bits":
        train(zoo.MLP, zero1(shard_group=1, master_weights=False, **OUTER), precision="bf16-true")
    elif name == "lbfgs":
        train(lambda: zoo.MLP(torch.optim.LBFGS), strategy)
    else:
        train(zoo.Complex, strategy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream", "outer_every needs training loaders that know their lengths"),
        ("lbfgs", "outer_every needs optimizers whose state is sharded"),
        ("complex", "and real parameters"),
        ("16 bits", "outer_every needs master weights for 16-bit parameters"),
        ("ema", "outer_every does not work with EMAWeightAveraging, whose averages need all ranks"),
        ("swa", "outer_every does not work with StochasticWeightAveraging"),
    ],
)
def test_a_training_in_which_groups_cannot_meet_is_refused(pool: RankPool, name: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, train_refused, name)
