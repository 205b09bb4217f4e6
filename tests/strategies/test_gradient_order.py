"""Buckets of ``zero1_custom`` leave in the order in which gradients are made, wherever layers are registered."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32, adagrad
from tests.strategies.parity import Looks, ddp, largest_difference, make_trainer, train, zero1

LAYERS = 6


class RegisteredBackwards(zoo.Zoo):
    def build(self) -> None:
        layers = {f"layer{at}": nn.Linear(zoo.FEATURES, zoo.FEATURES) for at in range(LAYERS)}
        self.layers = nn.ModuleDict({name: layers[name] for name in reversed(layers)})

    def uses(self, at: int) -> bool:
        return True

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = batch
        for at in filter(self.uses, range(LAYERS)):
            hidden = hidden + torch.tanh(self.layers[f"layer{at}"](hidden))
        return hidden.pow(2).mean()


class WithoutOneLayer(RegisteredBackwards):
    """On rank 1 another layer is left out in every step: rank 0 decides for all."""

    def uses(self, at: int) -> bool:
        return at != 2 + self.global_rank


def planned(trainer: Trainer) -> list[str]:
    """The layers in the order in which their weights leave."""
    plan = trainer.strategy._engine.plan
    return [name.split(".")[1] for bucket in plan for name in bucket if name.endswith("weight")]


def distance_and_plan(
    module: Callable[[], zoo.Zoo], policy: dict[str, Any], arguments: dict[str, Any]
) -> tuple[float, list[str]]:
    looks = Looks(planned)
    expected = train(module, ddp(), **arguments)
    found = train(module, zero1(**policy), callbacks=[looks], **arguments)
    return largest_difference(found, expected), looks.seen


BACKWARD = [f"layer{at}" for at in reversed(range(LAYERS))]


def test_buckets_follow_the_first_backward_and_results_stay_those_of_ddp(pool: RankPool) -> None:
    in_windows = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    for policy, arguments in (
        ({}, in_windows),
        ({"shard_gradients": True}, in_windows),
        ({"expose_gradients": True}, {}),
        ({"partition": "parameter"}, {}),
    ):
        for distance, order in pool.run(2, distance_and_plan, RegisteredBackwards, policy, arguments):
            assert distance <= FP32
            assert order == BACKWARD


def test_ranks_that_use_other_layers_follow_rank_0(pool: RankPool) -> None:
    found = pool.run(2, distance_and_plan, WithoutOneLayer, {}, {})
    expected = [*(name for name in BACKWARD if name != "layer2"), "layer2"]
    assert [order for _, order in found] == [expected, expected]
    assert max(distance for distance, _ in found) <= FP32


class KeepsItsOptimizer(RegisteredBackwards):
    """In bf16, with steps that are too small for it."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "optimizer"):
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        return self.optimizer


def in_one_and_two_fits() -> tuple[list[float], list[float]]:
    """Weights after two epochs in one fit, and in two that have one optimizer."""
    ended = []
    for epochs in ((2,), (1, 1)):
        torch.manual_seed(0)
        module = KeepsItsOptimizer()
        for number in epochs:
            trainer = make_trainer(zero1(), max_epochs=number, precision="bf16-true")
            trainer.fit(module, zoo.loader(80, 4, dtype=torch.bfloat16))
        ended.append([float(one.detach().double().sum()) for one in module.parameters()])
    return ended[0], ended[1]


def test_master_weights_without_other_state_are_kept(pool: RankPool) -> None:
    for once, twice in pool.run(2, in_one_and_two_fits):
        assert once == twice


def resumed_plans(folder: str) -> tuple[list[str], list[str]]:
    """The order after a resume from a checkpoint of ``zero1_custom``, and from one of ``ddp``."""
    plans = []
    for number, strategy in enumerate((zero1(), ddp())):
        path = str(Path(folder) / f"{number}.ckpt")
        saves, looks = Looks(lambda trainer, path=path: trainer.save_checkpoint(path)), Looks(planned)
        train(RegisteredBackwards, strategy, max_steps=3, callbacks=[saves])
        trainer = make_trainer(zero1(), max_epochs=2, callbacks=[looks])
        trainer.fit(RegisteredBackwards(), zoo.loader(80, 4), ckpt_path=path)
        plans.append(looks.seen)
    return plans[0], plans[1]


def test_buckets_stay_if_an_optimizer_has_state(pool: RankPool, tmp_path: Path) -> None:
    """A checkpoint's plan goes on; a checkpoint without one, and an optimizer with state, leave the registration's."""
    for kept, without in pool.run(2, resumed_plans, str(tmp_path)):
        assert kept == BACKWARD
        assert without == BACKWARD[::-1]
    for distance, order in pool.run(2, distance_and_plan, partial(RegisteredBackwards, adagrad), {}, {}):
        assert order == BACKWARD[::-1]
        assert distance <= FP32
