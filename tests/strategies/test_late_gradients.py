"""Steps that take the gradients of the step before: against one process that steps one late."""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_parstrat import ZeRO1Strategy, ZeRO2Strategy
from tests.comparing import assert_same, distance
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import CLIP, adafactor, plain_sgd
from tests.strategies.parity import looks_at_no_gradient, make_trainer, train, zero1

SAMPLES, BATCH = 40, 4


class Case(NamedTuple):
    """A training, and how far it may be from one process."""

    module: type[zoo.Zoo] = zoo.MLP
    optimizer: Any = zoo.adamw
    trainer: dict[str, Any] = {}  # noqa: RUF012
    strategy: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 1e-6
    sizes: tuple[int, ...] = (2,)


CASES = {
    "sgd": Case(optimizer=plain_sgd, sizes=(1, 2, 3)),
    "adamw, clipped": Case(trainer=CLIP, tolerance=2e-5),
    "sgd, accumulated": Case(optimizer=plain_sgd, trainer={"accumulate_grad_batches": 2}),
    "a layer in every other step": Case(zoo.Unused, tolerance=2e-5),
    "scheduled": Case(zoo.ScheduledTransformer, plain_sgd),
    "whole parameters": Case(zoo.Convolutional, adafactor, {"precision": "64-true"}, tolerance=1e-9),
    "waits for parameters": Case(optimizer=plain_sgd, strategy={"overlap_param_gather": False}),
    "one bucket in flight": Case(optimizer=plain_sgd, strategy={"max_inflight_buckets": 1}),
    "groups": Case(optimizer=plain_sgd, strategy={"shard_group": 1}),
}
QUICK = {("sgd", 2), ("adamw, clipped", 2), ("a layer in every other step", 2)}
TRAININGS = [(name, size) for name, case in CASES.items() for size in case.sizes]


def play(case: Case) -> list[Tensor]:
    """The parameters after a training of one process whose optimizer gets each gradient a step late."""
    torch.manual_seed(0)
    module, world = case.module(case.optimizer), dist.get_world_size()
    dtype = torch.float64 if "precision" in case.trainer else torch.float32
    module.to(dtype)
    made = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    window, clip = case.trainer.get("accumulate_grad_batches", 1), case.trainer.get("gradient_clip_val")
    batches = list(zoo.loader(SAMPLES * world, BATCH * world, dtype))
    parameters, late = list(module.parameters()), None
    for step in range(len(batches) // window + 1):
        gradients: Any = None
        for micro in range(step * window, min((step + 1) * window, len(batches))):
            (module.training_step(batches[micro], micro) / window).backward()
            gradients = True
        gradients = [one.grad for one in parameters] if gradients else None
        if late is not None:
            for one, gradient in zip(parameters, late, strict=True):
                one.grad = gradient
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        late = gradients
        optimizer.zero_grad()
        if isinstance(made, dict) and gradients is not None:
            made["lr_scheduler"]["scheduler"].step()
    return [one.detach() for one in parameters]


def compare(name: str) -> float:
    case = CASES[name]
    run = train(lambda: case.module(case.optimizer), zero1(late_gradients=1, **case.strategy), **case.trainer)
    expected = play(case)
    scale = max(float(one.abs().max()) for one in expected)
    return distance([one.detach() for one in run.module.parameters()], expected) / scale


@pytest.mark.parametrize(("name", "ranks"), slow_unless(lambda *one: one in QUICK, TRAININGS))
def test_trains_as_one_process_that_steps_one_late(pool: RankPool, name: str, ranks: int) -> None:
    for difference in pool.run(ranks, compare, name):
        assert difference <= CASES[name].tolerance


@looks_at_no_gradient
class Notes(Callback):
    def __init__(self) -> None:
        self.validated: list[list[Tensor]] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.validated.append([one.detach().clone() for one in pl_module.parameters()])


def train_and_save(folder: str, ckpt_path: str | None = None) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Trains ten steps with a validation and a save after the seventh."""
    notes = Notes()
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    trainer = make_trainer(
        zero1(late_gradients=1),
        callbacks=[notes, save],
        enable_checkpointing=True,
        val_check_interval=7,
        num_sanity_val_steps=0,
        **CLIP,
    )
    module = zoo.MLP()
    data = zoo.loader(SAMPLES * 2, 4, rank=dist.get_rank(), world_size=2)
    trainer.fit(module, data, zoo.loader(8, 8), ckpt_path=ckpt_path)
    return {name: one.clone() for name, one in module.state_dict().items()}, notes.validated


def test_nothing_is_put_off_beyond_a_validation_and_a_save(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(2, train_and_save, str(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    for (last, validated), (again, _) in zip(
        whole, pool.run(2, train_and_save, str(tmp_path / "again"), str(path)), strict=True
    ):
        assert_same(again, last)
        assert_same(validated, whole[0][1])
    checkpoint = torch.load(path, weights_only=True)
    assert_same(list(checkpoint["state_dict"].values()), whole[0][1][0])
    # As many updates as steps.
    assert {int(state["step"]) for state in checkpoint["optimizer_states"][0]["state"].values()} == {7}


class Weighed(zoo.MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.compute_loss(batch), "loss_weight": len(batch)}


class ByHand(zoo.StepsByHand, zoo.MLP):
    pass


class Reads(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None: ...


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lbfgs": (lambda: zoo.MLP(torch.optim.LBFGS), {}, "late_gradients needs optimizers whose state is sharded"),
    "weights": (Weighed, {}, "late_gradients=1 takes no `loss_weight`. Leave out one of the two."),
    "by hand": (ByHand, {}, "and manual optimization needs those of the same step"),
    "hooks": (zoo.MLP, {"callbacks": [Reads()]}, "Reads"),
    "fp16": (zoo.MLP, {"fp16": True}, "and a loss scale (16-mixed) needs those of the same step"),
}


def train_refused(name: str) -> None:
    make, arguments, _ = REFUSED[name]
    choice = "auto" if name == "hooks" else False
    train(make, zero1(late_gradients=1, expose_gradients=choice), **arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_a_training_that_needs_the_gradients_of_the_same_step_is_refused(pool: RankPool, name: str) -> None:
    with pytest.raises(RankError, match=re.escape(REFUSED[name][2])):
        pool.run(2, train_refused, name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(ZeRO1Strategy, late_gradients=2), "Invalid late_gradients: 2. Must be 0 or 1."),
        (partial(ZeRO1Strategy, late_gradients=True), "Invalid late_gradients: True. Must be 0 or 1."),
        (partial(ZeRO2Strategy, late_gradients=1), "set zero1_custom, not zero2_custom."),
        (
            partial(ZeRO1Strategy, late_gradients=1, outer_every=5, shard_group=1),
            "outer_every needs late_gradients=0, and it is 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
