"""Trainings of modules that ``zero3_custom`` alone could get wrong: each ends where ``ddp`` ends. A training is a line.

Writes within a step, losses that are made of gradients, 16 bits, modules on the meta device, and whatever holds a
parameter. What all strategies train is in ``cases.py``.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import FP32, FP64
from tests.strategies.odd import Blocks
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, train, whole, zero3
from tests.torch_versions import needs_torch

FEATURES = zoo.FEATURES
ROOT, UNITS = {"min_num_params": 10**9}, {"min_num_params": 0}
"""All parameters are gathered for a whole step; or those of blocks by themselves."""


class Penalised(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class KeepsGraphs(Blocks):
    """Of what it computes of weights between steps, with the graph that leads to them."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.norm = sum(parameter.norm() for parameter in self.parameters())


class KeepsWeakly(Blocks):
    """As libraries do that average weights."""

    def on_fit_start(self) -> None:
        self.known = [weakref.ref(parameter) for parameter in self.parameters()]


class Skips(zoo.Zoo):
    """All ranks call all of three blocks alike; one of them makes nothing of what the second returns."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            batch = batch + block(batch) * float(number != 1 or dist.get_rank() != 1)
        return (batch - 1).square().mean()


# Writes within a step.


WRITES: dict[str, Callable[[list[Any], list[Any]], None]] = {
    "in place": lambda teacher, student: [
        q.mul_(0.9).add_(p, alpha=0.1) for p, q in zip(student, teacher, strict=True)
    ],
    "by data.mul_()": lambda teacher, student: [
        q.data.mul_(0.9).add_(p.data, alpha=0.1) for p, q in zip(student, teacher, strict=True)
    ],
    "foreach": lambda teacher, student: (
        torch._foreach_mul_(teacher, 0.9),
        torch._foreach_add_(teacher, student, alpha=0.1),
    ),
}


class Teaches(Blocks):
    """Keeps a teacher's moving average in ``training_step``, as BYOL, MoCo and DINO do."""

    way = "in place"

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[self.way](list(self.teacher.parameters()), list(self.blocks.parameters()))
            target = batch
            for block in self.teacher:
                target = block(target)
        return super().compute_loss(batch) + (target - self.blocks[0](batch)).pow(2).mean()


def by_way(base: type[Blocks], way: str) -> type[Blocks]:
    return type(base.__name__, (base,), {"way": way})


class Clamps(Blocks):
    """Each block keeps its weight within bounds in its own forward, where it is gathered."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, _: block.linear.weight.data.clamp_(-0.1, 0.1))


# Losses that are made of gradients, and training steps that take gradients of their own.


def slope(outputs: Tensor, inputs: Tensor, create_graph: bool = True) -> Tensor:
    (found,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=create_graph)
    return found


def penalty(outputs: Tensor, inputs: Tensor) -> Tensor:
    return (slope(outputs, inputs).norm(dim=1) - 1).pow(2).mean()


class Scores(zoo.Zoo):
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


class CalledAgain(Scores):
    """Everything is called once more when the gradient is there, which is freed by FSDP2 once the call was run back."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        penalised = penalty(self.score(inputs), inputs)
        return penalised + self.score(batch * 2).pow(2).mean()


class NowAndThen(Scores):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.score(batch).pow(2).mean()
        if batch_idx % 3 == 1:
            inputs = batch.clone().requires_grad_(True)
            loss = loss + penalty(self.score(inputs), inputs)
        return loss


class Perturbed(Scores):
    """Looks for a perturbation by gradients of inputs alone, as often on every rank."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        for _ in range(2):
            inputs = batch.clone().requires_grad_(True)
            batch = batch + 0.1 * slope(self.score(inputs), inputs, create_graph=False).sign()
        return self.score(batch).pow(2).mean()


class Checkpointed(Scores):
    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.exit(hidden)

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        outputs = self.score(inputs)
        return outputs.pow(2).mean() + penalty(outputs, inputs)


class ManualScores(Scores):
    """One step by hand with gradients that are zeroed first."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.run_backwards(batch, batch.clone().requires_grad_(True))
        optimizer.step()
        return loss.detach()

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class PenaltyAlone(ManualScores):
    """Of the last layer nothing but its weights counts."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        loss = penalty(self.score(inputs), inputs)
        self.manual_backward(loss)
        return loss


class TwoLosses(ManualScores):
    """A backward before that of the penalty, and one after it."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        self.manual_backward(self.score(batch).pow(2).mean())
        self.manual_backward(penalty(self.score(inputs), inputs))
        self.manual_backward(self.score(batch).abs().mean())
        return torch.zeros(())


class GraphOfBackward(ManualScores):
    """A backward that makes a graph of itself, of which nothing is made; DDP ends with an error."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        loss = self.score(batch).pow(2).mean()
        self.manual_backward(loss, create_graph=True)
        return loss


# 16 bits.


class Normalised(zoo.Zoo):
    """Layers that autocast rounds, and layers that it does not: an embedding and norms."""

    def build(self) -> None:
        self.position = nn.Embedding(4, FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(FEATURES)
        self.unused = nn.Linear(FEATURES, 1)
        self.head = nn.Linear(FEATURES, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        batch = batch + self.position(torch.arange(len(batch)) % 4)
        for block in self.blocks:
            batch = batch + block(batch)
        return self.head(self.norm(batch)).square().mean()


class Training(NamedTuple):
    """``by_ddp`` says that the oracle is ``ddp``; else it is one process on the whole batch."""

    module: Callable[[], Any]
    strategy: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    trainer: dict[str, Any] = {}  # noqa: RUF012
    ranks: int = 2
    by_ddp: bool = True
    tolerance: float = FP32


MIXED = {"precision": "bf16-mixed"}
WINDOW = {"accumulate_grad_batches": 2}
WHOLE_WINDOW = {"shard_gradients": False}, WINDOW
STAY = {"reshard_after_forward": False}
ONE_BY_ONE = {"wrap": ["Linear"]}
SCALED = {"fp16": True}
TRAININGS: dict[str, dict[str, Training]] = {
    "what is held": {
        "a penalty on what is left to the root": Training(Penalised, ROOT),
        "graphs of weights that are kept": Training(KeepsGraphs),
        "parameters that are held weakly": Training(KeepsWeakly),
        "a result multiplied by 0 on a rank": Training(Skips),
    },
    "written": {
        "in place, units": Training(Teaches, UNITS),
        "in place, units stay": Training(Teaches, {**UNITS, **STAY}),
        **{f"{way}, root": Training(by_way(Teaches, way), ROOT) for way in WRITES},
        "gathered in their own dtype": Training(Teaches, {**ROOT, "gather_dtype": None}, MIXED),
        "by a block to its own weights": Training(Clamps, UNITS),
    },
    "gradients": {
        "called again": Training(CalledAgain),
        "called again, accumulated whole": Training(CalledAgain, *WHOLE_WINDOW),
        "penalty alone": Training(PenaltyAlone),
        "graph of a backward": Training(GraphOfBackward, by_ddp=False),
    },
    "gradients, in other ways": {
        "now and then": Training(NowAndThen, trainer=WINDOW, ranks=3),
        "perturbed": Training(Perturbed, STAY),
        "perturbed, one by one": Training(Perturbed, ONE_BY_ONE, WINDOW),
        "checkpointed": Training(Checkpointed, *WHOLE_WINDOW, ranks=3),
        "checkpointed, units stay": Training(Checkpointed, STAY),
        "penalty alone, one by one": Training(PenaltyAlone, ONE_BY_ONE, ranks=3),
        "two losses": Training(TwoLosses, ranks=3),
        "two losses, one by one": Training(TwoLosses, ONE_BY_ONE),
        "graph of a backward, units stay": Training(GraphOfBackward, STAY, ranks=1, by_ddp=False),
        "written, one by one": Training(by_way(Teaches, "foreach"), ONE_BY_ONE, ranks=3),
    },
    "16 bits": {
        "bf16-mixed": Training(Normalised, trainer=MIXED),
        "bf16-mixed, gradients whole": Training(Normalised, {"shard_gradients": False}, {**MIXED, **WINDOW}),
        # On CPUs Lightning makes "16-mixed" bf16, with a warning, under every strategy.
        "16-mixed": Training(zoo.MLP, trainer={"precision": "16-mixed"}),
        "64-true": Training(zoo.MLP, trainer={"precision": "64-true"}, tolerance=FP64),
        # Convolutions' weights may stay whole, beside others that are sharded: torch unscales no mixture.
        "a scaler": Training(zoo.Convolutional, trainer=SCALED, tolerance=1e-3),
        "a scale so large that steps are skipped": Training(
            zoo.Convolutional, trainer={**SCALED, "init_scale": 2.0**24}, tolerance=1e-3
        ),
    },
}


def compare(subject: str, ranks: int) -> dict[str, tuple[float, float, float]]:
    """How far parameters and losses are from the oracle's, and how far the oracle's parameters have moved."""
    found = {}
    for name, case in TRAININGS[subject].items():
        if case.ranks == ranks:
            expected = train(case.module, ddp() if case.by_ddp else None, whole_batch=not case.by_ddp, **case.trainer)
            actual = train(case.module, zero3(**case.strategy), **case.trainer)
            moved = distance(expected.parameters[-1], expected.parameters[0])
            found[name] = largest_difference(actual, expected), largest_loss_difference(actual, expected), moved
    return found


@pytest.mark.parametrize(
    "subject", slow_unless(lambda name: name not in ("gradients, in other ways", "16 bits"), TRAININGS)
)
def test_trains_as_ddp_does(pool: RankPool, subject: str) -> None:
    cases = TRAININGS[subject]
    for ranks in sorted({case.ranks for case in cases.values()}):
        for found in pool.run(ranks, compare, subject, ranks):
            for name, (parameters, losses, moved) in found.items():
                assert parameters <= cases[name].tolerance, name
                assert losses <= 10 * cases[name].tolerance, name
                assert moved > 1e-3, name


# What no comparison of parameters shows.


class LogsWeights(Blocks):
    """What is logged as it is; and what is made a number by `full_tensor`."""

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


def count_graphs() -> list[tuple[int, int]]:
    """Of modules whose blocks are compiled: graphs that were made, and where a graph had to be broken."""
    found, counters = [], torch._dynamo.utils.counters
    for module, wrap in ((odd.CompiledBlocks, None), (odd.WrappedBlocks, ["Block"])):
        torch._dynamo.reset()
        counters.clear()
        train(lambda module=module: module(zoo.adamw), zero3(wrap=wrap), validate=True)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    torch._dynamo.reset()
    return found


@pytest.mark.slow
def test_blocks_are_compiled_as_a_whole(pool: RankPool) -> None:
    for found in pool.run(2, count_graphs):
        assert all(graphs > 0 and breaks == 0 for graphs, breaks in found), found
