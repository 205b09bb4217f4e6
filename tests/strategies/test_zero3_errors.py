"""What ``zero3_custom`` cannot do, or a user's code cannot do to shards, says what has happened and what to do."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.checkpoint.test_sharded_checkpoints import tuned
from tests.strategies.parity import by_flag, ddp, largest_difference, make_trainer, train, whole, zero3
from tests.torch_versions import needs_torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(zoo.FEATURES, zoo.FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Blocks(zoo.Zoo):
    """Blocks that are units, and a layer of the root."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(zoo.FEATURES, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (self.head(batch) - 0.2).pow(2).mean()


class Penalised(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class PenalisedFirst(Blocks):
    """A vector beside a sum: torch refuses the mixture, before there is a loss."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        drift = sum((p - torch.ones(p.shape)).pow(2).sum() for p in self.parameters())
        return super().compute_loss(batch) + 0.01 * drift


class PenalisedByHand(Blocks):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch) + sum(p.pow(2).sum() for p in self.parameters()))
        optimizer.step()


class Flattens(Blocks):
    def on_train_batch_end(self, *args: Any) -> None:
        torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


class TakesArrays(Blocks):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.detach().numpy()


class LogsNorms(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class LogsMeans(Blocks):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.head.weight.detach().norm(), sync_dist=True)


def message_of(make: Callable[[], Any], strategy: Any) -> str:
    with pytest.raises(Exception) as raised:
        train(make, strategy)
    return str(raised.value)


def said_of_shards(make: Callable[[], Any]) -> str:
    return message_of(make, zero3())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Penalised, ["training_step", "blocks.0, blocks.1, blocks.2", "weight_decay", "min_num_params"]),
        (PenalisedFirst, ["mixed torch.Tensor and DTensor", "blocks.0, blocks.1, blocks.2", "weight_decay"]),
        (PenalisedByHand, ["mixed torch.Tensor and DTensor", "manual optimization", "zero1_custom"]),
        pytest.param(
            Flattens,
            ["full_parameters()", "full_tensor()", "on all ranks"],
            marks=needs_torch("2.13", "what is concatenated is one DTensor, and right"),
        ),
        (LogsNorms, ["GradNormMonitor"]),
        (LogsMeans, ["full_tensor()", "also of a sum or a norm"]),
        (TakesArrays, ["full_parameters()", "full_tensor()", "on all ranks"]),
    ],
)
def test_code_that_works_on_shards_as_if_they_were_whole_is_told(
    pool: RankPool, make: Callable[[], Any], expected: list[str]
) -> None:
    for said in pool.run(2, said_of_shards, make):
        assert all(part in said for part in expected), said
        assert said.count("full_parameters()") == 1


def penalised_as_the_error_says() -> float:
    return largest_difference(train(Penalised, zero3(min_num_params=10**9)), train(Penalised, ddp()))


def test_a_penalty_on_what_is_left_to_the_root_is_that_of_ddp(pool: RankPool) -> None:
    assert max(pool.run(2, penalised_as_the_error_says)) <= FP32


class OnMeta(zoo.Zoo):
    """A parameter of the root itself, and a module whose class does not say how it is made."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Linear(zoo.FEATURES, 8)
            self.scale = nn.Parameter(torch.ones(8))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.scale).pow(2).mean()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(zoo.FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Within(OnMeta):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.scales = nn.ModuleList(Scale() for _ in range(2))


class Made(OnMeta):
    """As the error says."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (OnMeta, ["scale of OnMeta", "reset_parameters", "meta device"]),
        (Within, ["scales.1.factor of Scale", "reset_parameters", "meta device"]),
    ],
)
def test_what_cannot_be_made_is_named_before_training(
    pool: RankPool, make: Callable[[], Any], expected: list[str]
) -> None:
    for said in pool.run(2, said_of_shards, make):
        assert all(part in said for part in expected), said


class MadeAtOnce(Made):
    def configure_model(self) -> None:
        self.net = nn.Linear(zoo.FEATURES, 8)
        self.scale = nn.Parameter(torch.ones(8))


def compare_made() -> float:
    return largest_difference(train(Made, zero3()), train(MadeAtOnce, ddp()))


def test_a_root_that_says_how_it_is_made_trains(pool: RankPool) -> None:
    assert max(pool.run(2, compare_made)) <= FP32


class KeepsGraphs(Blocks):
    """Of what it computes of weights between steps, with the graph that leads to them."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.norm = sum(parameter.norm() for parameter in self.parameters())


class KeepsWeakly(Blocks):
    """As libraries do that average weights."""

    def on_fit_start(self) -> None:
        self.known = [weakref.ref(parameter) for parameter in self.parameters()]


def keep(make: type[Blocks]) -> float:
    return largest_difference(train(make, zero3()), train(make, ddp()))


@pytest.mark.parametrize("make", [KeepsGraphs, KeepsWeakly])
def test_a_training_ends_whatever_holds_its_parameters(pool: RankPool, make: type[Blocks]) -> None:
    assert max(pool.run(2, keep, make)) <= FP32


LATER = {"zero1_custom": by_flag, "ddp_tuned": tuned}


def trained_before(name: str) -> list[str]:
    module = Blocks()
    train(lambda: module, zero3())
    said = [message_of(lambda: module, LATER[name]())]
    with pytest.raises(ValueError) as raised:
        make_trainer(LATER[name]()).validate(module, zoo.loader(8, 4), verbose=False)
    return [*said, str(raised.value)]


@pytest.mark.parametrize("name", LATER)
def test_a_module_that_is_sharded_is_refused_where_it_must_be_whole(pool: RankPool, name: str) -> None:
    for said in pool.run(2, trained_before, name):
        assert all(part in one for one in said for part in (name, "blocks.0.linear.weight", "checkpoint", "zero3")), (
            said
        )


class LogsWeights(Blocks):
    """What is logged as it is; and what is made a number, by the error's advice."""

    def on_train_batch_end(self, *args: Any) -> None:
        weights = list(self.parameters())
        self.log("all", torch.stack([one.detach().norm() for one in weights]).norm())
        self.log("mean", weights[0].mean())
        self.log("number", float(whole(weights[0].detach().norm())))


def log_weights() -> tuple[list[float], list[float]]:
    ours, theirs = (train(LogsWeights, strategy).trainer.callback_metrics for strategy in (zero3(), ddp()))
    return [float(ours[name]) for name in theirs], [float(value) for value in theirs.values()]


@needs_torch("2.13", "a mean that is logged is the rank's own")
def test_norms_of_weights_are_logged_as_under_ddp(pool: RankPool) -> None:
    for ours, theirs in pool.run(2, log_weights):
        assert len(ours) == 3
        torch.testing.assert_close(ours, theirs)
