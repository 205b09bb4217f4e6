"""A training begins with rank 0's values, draws the random numbers that ``ddp`` draws, and goes where ``ddp`` goes.

Ranks are seeded differently, as in a program without a seed.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, train, whole, zero1, zero3

SEED = 10
STRATEGIES: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: name for name in ("ddp_tuned", "zero1_custom", "zero2_custom", "zero3_custom")},
    "zero1, several buckets": zero1,
    "zero2, several buckets": lambda: zero1(shard_gradients=True),
    "zero3, several units": zero3,
}


class Drops(zoo.Zoo):
    """Parameters that train and that do not, buffers of two dtypes, and dropout."""

    def build(self) -> None:
        self.frozen = nn.Linear(zoo.FEATURES, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(16))
        self.offset, self.chosen = nn.Buffer(torch.randn(16)), nn.Buffer(torch.randint(1000, (5,)))
        self.net = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.4), nn.Tanh(), nn.Linear(33, 1))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(torch.tanh(self.frozen(batch)) * self.scale + self.offset) - 0.3).pow(2).mean()


class Begins(Callback):
    """Notes the values that training begins with, and the state of all generators then and after each step."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.generators: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values = {name: whole(value.detach()).clone() for name, value in pl_module.state_dict().items()}
        self._note()

    def on_train_batch_end(self, *_: Any) -> None:
        self._note()

    def _note(self) -> None:
        numbers = [str(one) for one in (random.getstate(), numpy.random.get_state())]
        self.generators.append([torch.get_rng_state().tolist(), *numbers])


# It looks at no gradient.
Begins.on_train_batch_end.__module__ = "lightning.pytorch.callbacks"


def made_by(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(SEED + rank)
    return Drops().state_dict()


def begin(name: str) -> tuple[float, float, list[bool], float, float]:
    """How far the first values are from rank 0's, and rank 1's from these; which generators differ from ``ddp``'s."""
    trained = []
    for strategy in (ddp(), STRATEGIES[name]()):
        begins = Begins()
        random.seed(dist.get_rank())
        numpy.random.seed(dist.get_rank())
        trained.append((train(Drops, strategy, 12, seed=SEED + dist.get_rank(), callbacks=[begins]), begins))
    (expected, expected_begins), (actual, begins) = trained
    first = made_by(0)
    same = [one == other for one, other in zip(begins.generators, expected_begins.generators, strict=True)]
    moved = distance(expected.parameters[-1], expected.parameters[0])
    return (
        distance([begins.values[key] for key in first], list(first.values())),
        distance(made_by(1), first),
        same,
        largest_difference(actual, expected),
        moved,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_begins_with_rank_0s_values_and_draws_what_ddp_draws(pool: RankPool, name: str) -> None:
    for from_rank_0, between_ranks, same, difference, moved in pool.run(2, begin, name):
        assert from_rank_0 == 0 and between_ranks > 0.1
        assert same == [True] * 4
        assert difference <= FP32 and moved > 1e-3
