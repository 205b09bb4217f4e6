"""``zero3_custom`` beside ``ddp`` where a loss is made of gradients, or a training step takes gradients of its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, train, zero3
from tests.strategies.zoo import FEATURES, Zoo


def slope(outputs: Tensor, inputs: Tensor, create_graph: bool = True) -> Tensor:
    (found,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=create_graph)
    return found


def penalty(outputs: Tensor, inputs: Tensor) -> Tensor:
    return (slope(outputs, inputs).norm(dim=1) - 1).pow(2).mean()


class Blocks(Zoo):
    """Blocks that are units, between layers of the root; nobody uses the last layer."""

    def build(self) -> None:
        self.entrance = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.exit = nn.Linear(8, 1)
        self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.exit(hidden)


class Penalised(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        outputs = self.score(inputs)
        return outputs.pow(2).mean() + penalty(outputs, inputs)


class CalledAgain(Blocks):
    """Everything is called once more when the gradient is there, which is freed by FSDP2 once the call was run back."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        penalised = penalty(self.score(inputs), inputs)
        return penalised + self.score(batch * 2).pow(2).mean()


class NowAndThen(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.score(batch).pow(2).mean()
        if batch_idx % 3 == 1:
            inputs = batch.clone().requires_grad_(True)
            loss = loss + penalty(self.score(inputs), inputs)
        return loss


class Perturbed(Blocks):
    """Looks for a perturbation by gradients of inputs alone, as often on every rank."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        for _ in range(2):
            inputs = batch.clone().requires_grad_(True)
            batch = batch + 0.1 * slope(self.score(inputs), inputs, create_graph=False).sign()
        return self.score(batch).pow(2).mean()


class SecondDerivatives(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        first = slope(self.score(inputs), inputs)
        return slope(first.pow(2), inputs).pow(2).mean() + first.pow(2).mean()


class Checkpointed(Penalised):
    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.exit(hidden)


class ManualBlocks(Blocks):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False


class Critic(ManualBlocks):
    """Gradients are zeroed first, and the critic is called again after its penalty."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        inputs = batch.clone().requires_grad_(True)
        penalised = penalty(self.score(inputs), inputs)
        loss = F.softplus(-self.score(batch)).mean() + F.softplus(self.score(batch.flip(0))).mean() + penalised
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class PenaltyAlone(ManualBlocks):
    """Of the last layer nothing but its weights counts."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        inputs = batch.clone().requires_grad_(True)
        loss = penalty(self.score(inputs), inputs)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class TwoLosses(ManualBlocks):
    """A backward before that of the penalty, and one after it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.score(batch).pow(2).mean())
        inputs = batch.clone().requires_grad_(True)
        self.manual_backward(penalty(self.score(inputs), inputs))
        self.manual_backward(self.score(batch).abs().mean())
        optimizer.step()
        return torch.zeros(())


class GraphOfBackward(ManualBlocks):
    """A backward that makes a graph of itself, of which nothing is made; DDP ends with an error."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.score(batch).pow(2).mean()
        self.manual_backward(loss, create_graph=True)
        optimizer.step()
        return loss.detach()


TRAINED: dict[str, type[Zoo]] = {
    cls.__name__: cls
    for cls in (
        Penalised,
        CalledAgain,
        NowAndThen,
        Perturbed,
        Checkpointed,
        Critic,
        PenaltyAlone,
        TwoLosses,
        GraphOfBackward,
    )
}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "units stay": ({"reshard_after_forward": False}, {}),
    "one by one": ({"wrap": ["Linear"]}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "accumulated whole": ({"shard_gradients": False}, {"accumulate_grad_batches": 2}),
}


def compare(name: str, arguments: str) -> tuple[float, float]:
    strategy, trainer = ARGUMENTS[arguments]
    alone = TRAINED[name] is GraphOfBackward
    expected = train(TRAINED[name], None if alone else ddp(), whole_batch=alone, **trainer)
    actual = train(TRAINED[name], zero3(**strategy), **trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected)


@pytest.mark.parametrize(
    ("name", "arguments", "world_size"),
    slow_unless(
        lambda name, arguments, size: (
            (name, arguments, size) in (("Penalised", "as it is", 2), ("Critic", "as it is", 2))
        ),
        [
            (name, arguments, size)
            for name, cls in TRAINED.items()
            for arguments in ARGUMENTS
            for size in (2, 3)
            if not (issubclass(cls, ManualBlocks) and "accumulated" in arguments)
        ],
    ),
)
def test_trains_as_ddp_does(pool: RankPool, name: str, arguments: str, world_size: int) -> None:
    for parameters, losses in pool.run(world_size, compare, name, arguments):
        assert parameters <= FP32
        assert losses <= 10 * FP32


REFUSED: dict[str, tuple[type[Zoo], str]] = {
    "gradients of gradients, in the training step": (SecondDerivatives, "setStorage"),
}


def train_refused(name: str) -> None:
    train(REFUSED[name][0], zero3())


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_says_so(pool: RankPool, name: str) -> None:
    with pytest.raises(RankError, match=REFUSED[name][1]):
        pool.run(2, train_refused, name)
