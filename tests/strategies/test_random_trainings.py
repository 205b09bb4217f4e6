"""Trainings put together at random: what every feature does alone, they must do in any combination."""

import gc
import random
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.comparing import worst
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import late
from tests.strategies.odd_optimizers import GloballyScaled
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, zero1


class AtRandom(zoo.Zoo):
    """Several optimizers of different kinds over experts, frozen, joined, accumulated, clipped, stepped at random.

    The decisions are drawn from a generator of its own, so that all ranks and both strategies come to the same ones.
    """

    automatic_optimization = False

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        super().__init__()

    def build(self) -> None:
        self.trunk = nn.Linear(zoo.FEATURES, 9)
        self.scale = nn.Parameter(torch.ones(9))
        self.experts = nn.ModuleList(nn.Linear(9, 7) for _ in range(3))
        self.late = nn.Linear(9, 7)
        self.head = nn.Linear(7, 2)
        self.joined = False

    def compute_loss(self, batch: Tensor) -> Tensor:
        by_data, with_late = self.draw.random() < 0.5, self.draw.random() < 0.4
        chosen = self.draw.randrange(3)
        hidden = torch.tanh(self.trunk(batch)) * self.scale
        outputs = self.experts[int(batch[0, 0].abs() * 100) % 3 if by_data else chosen](hidden)
        return (self.head(torch.tanh(outputs + self.late(hidden) if with_late else outputs)) - 0.1).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizers = self.optimizers() if isinstance(self.optimizers(), list) else [self.optimizers()]
        self.disturb([optimizer.optimizer for optimizer in optimizers])
        for _ in range(self.draw.choice([1, 1, 2])):
            optimizer = self.draw.choice(optimizers)
            for quiet in self.draw.choice([[False], [False], [False, False], [True, False]]):
                self.backward_once(batch, quiet)
            clipping = self.draw.choice([None, None, ("norm", 0.03), ("value", 0.01)])
            if clipping is not None:
                self.clip_gradients(optimizer, clipping[1], clipping[0])
            self.draw.choice([optimizer, optimizer, optimizers[0]]).step()
            for zeroed in self.draw.choice([optimizers, optimizers, [optimizer], []]):
                zeroed.zero_grad(set_to_none=self.draw.random() < 0.7)
        return torch.zeros(())

    def backward_once(self, batch: Tensor, quiet: bool) -> None:
        loss = self.compute_loss(batch)
        if not quiet:
            self.manual_backward(loss)
            return
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)

    def disturb(self, optimizers: list[Any]) -> None:
        optimizer = self.draw.choice(optimizers)
        what = self.draw.randrange(12)
        if what == 0:
            for module in (self.trunk, self.experts[0]):
                module.requires_grad_(self.draw.random() < 0.5)
        if what == 1 and not self.joined:
            self.joined = True
            optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.01})
        if what == 2:
            optimizer.param_groups[0]["lr"] *= 0.7
        if what == 3:
            optimizer.load_state_dict(optimizer.state_dict())

    def configure_optimizers(self) -> Any:
        makers = [
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.Adafactor(p, lr=1e-2),
            GloballyScaled,
            zoo.adamw,
        ]
        parameters = [*self.trunk.parameters(), *self.experts.parameters(), *self.head.parameters()]
        parameters += [self.scale] if self.draw.random() < 0.5 else []
        self.draw.shuffle(parameters)
        number = self.draw.choice([1, 2, 3])
        return [self.draw.choice(makers)(parameters[k::number]) for k in range(number)]


def compare(seeds: range, expose: Any, arrives: Any, bound: int | None) -> dict[int, float]:
    differences = {}
    for seed in seeds:
        ours, theirs = (
            train(lambda seed=seed: AtRandom(seed), strategy, precision="64-true")
            for strategy in (arrives(expose_gradients=expose, max_inflight_buckets=bound), ddp())
        )
        differences[seed] = largest_difference(ours, theirs)
    return differences


@pytest.mark.parametrize(("world_size", "expose"), [(2, "auto"), (3, False)])
@pytest.mark.parametrize("trainings", [2, pytest.param(8, marks=pytest.mark.slow)], ids=["a few", "many"])
def test_random_trainings_equal_ddps(pool: RankPool, trainings: int, expose: Any, world_size: int) -> None:
    # Of three ranks parameters arrive as late as they may, and each bucket of gradients is waited for.
    arrives, bound = (late, 1) if world_size == 3 else (zero1, None)
    # Each training is drawn once: by half of them gradients are exposed, by the others they are not.
    first = 2 * trainings if expose else 3 * trainings
    seeds = range(first, first + trainings)
    for differences in pool.run(world_size, compare, seeds, expose, arrives, bound):
        assert worst(differences) <= 1e-9, differences


class NeverSteps(zoo.MLP):
    """Leaves reductions under way at the end of training."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()


class Raises(zoo.MLP):
    def on_after_backward(self) -> None:
        raise ValueError("on every rank")


def parameters_left(module_class: type[zoo.Zoo]) -> int:
    module = module_class()
    trainer = make_trainer(zero1())
    with suppress(ValueError):
        trainer.fit(module, zoo.loader(8 * dist.get_world_size(), 4, rank=dist.get_rank(), world_size=2))
    references = [weakref.ref(parameter) for parameter in module.parameters()]
    del module, trainer
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_nothing_holds_on_to_a_module_after_its_training(own_pool: RankPool) -> None:
    for module_class in (zoo.MLP, NeverSteps, Raises):
        assert own_pool.run(2, parameters_left, module_class) == [0, 0]
