"""Trainings of modules that ``zero3_custom`` alone could get wrong: each ends where ``ddp`` ends. A training is a line.

Parameters that code has held since before the training, writes within a step, losses that are made of gradients, 16
bits, and whatever holds a parameter. What all strategies train is in ``cases.py``.
"""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parstrat.distributed.zero3.held_parameters import HeldParameter
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import FP32, FP64
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, reference, train, whole, zero3
from tests.torch_versions import needs_torch

FEATURES = zoo.FEATURES
ROOT, UNITS = {"min_num_params": 10**9}, {"min_num_params": 0}
"""All parameters are gathered for a whole step; or those of blocks by themselves."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Blocks(zoo.Zoo):
    """Blocks that are units, and a layer of the root."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(FEATURES, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (self.head(batch) - 0.2).pow(2).mean()


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


# Parameters that code has held since before the training.


class Shares(nn.Module):
    """A second module that has another one's parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        return self.weight.pow(2).sum()


def square(weight: Tensor) -> Tensor:
    return weight.pow(2).sum()


WAYS: dict[str, Callable[[nn.Parameter], Callable[[], Any]]] = {
    "list": lambda weight: functools.partial(lambda held: sum(p.pow(2).sum() for p in held), [weight]),
    "dict": lambda weight: functools.partial(lambda held: held["weight"].pow(2).sum(), {"weight": weight}),
    "closure": lambda weight: lambda: weight.pow(2).sum(),
    "partial": lambda weight: functools.partial(square, weight),
    "second module": Shares,
    "foreach": lambda weight: lambda: torch.stack(torch._foreach_norm([weight], 2)).square().sum(),
    "keyword": lambda weight: lambda: torch.mul(other=weight, input=weight).sum(),
}


class Holds(Blocks):
    """Penalises a weight of a block through what it has held since it was made, one way or another."""

    way = "list"

    def build(self) -> None:
        super().build()
        # In a list: a module among the attributes would be one of this one's own.
        self.penalty = [WAYS[self.way](self.blocks[0].linear.weight)]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.1 * self.penalty[0]()


class HoldsEmbedding(zoo.TiedLanguageModel):
    """What autocast does not round is held exactly."""

    def build(self) -> None:
        super().build()
        self.held = list(self.parameters())

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.1 * sum(p.square().sum() for p in self.held if p.dim() == 1)


# Writes within a step.


WRITES: dict[str, Callable[[list[Any], list[Any]], None]] = {
    "in place": lambda teacher, student: [
        q.mul_(0.9).add_(p, alpha=0.1) for p, q in zip(student, teacher, strict=True)
    ],
    "by data =": lambda teacher, student: [
        setattr(q, "data", q.data * 0.9 + p.data * 0.1) for p, q in zip(student, teacher, strict=True)
    ],
    "by data.mul_()": lambda teacher, student: [
        q.data.mul_(0.9).add_(p.data, alpha=0.1) for p, q in zip(student, teacher, strict=True)
    ],
    "foreach": lambda teacher, student: (
        torch._foreach_mul_(teacher, 0.9),
        torch._foreach_add_(teacher, student, alpha=0.1),
    ),
}
HELD = "through what is held"


class Teaches(Blocks):
    """Keeps a teacher's moving average in ``training_step``, as BYOL, MoCo and DINO do."""

    way = "in place"

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.held = list(self.teacher.parameters())

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.held if self.way == HELD else list(self.teacher.parameters())
            WRITES["in place" if self.way == HELD else self.way](teacher, list(self.blocks.parameters()))
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


class Trades(Blocks):
    """Two frozen parameters trade their data in each step."""

    def build(self) -> None:
        super().build()
        self.pair = nn.ModuleList(nn.Linear(FEATURES, 1).requires_grad_(False) for _ in range(2))

    def compute_loss(self, batch: Tensor) -> Tensor:
        first, second = self.pair[0].weight, self.pair[1].weight
        first.data, second.data = second.data, first.data
        return super().compute_loss(batch) + self.pair[0](batch).pow(2).mean()


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


class SlopePenalised(Scores):
    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        outputs = self.score(inputs)
        return outputs.pow(2).mean() + penalty(outputs, inputs)


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


class Checkpointed(SlopePenalised):
    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.exit(hidden)


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


class Critic(ManualScores):
    """The critic is called again after its penalty."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        penalised = penalty(self.score(inputs), inputs)
        loss = F.softplus(-self.score(batch)).mean() + F.softplus(self.score(batch.flip(0))).mean() + penalised
        self.manual_backward(loss)
        return loss


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
    """``oracle`` is what ``ddp`` trains, if not the same module; None stands for one process on the whole batch."""

    module: Callable[[], Any]
    strategy: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    trainer: dict[str, Any] = {}  # noqa: RUF012
    oracle: Callable[[], Any] | None = None
    by_ddp: bool = True
    tolerance: float = FP32


MIXED = {"precision": "bf16-mixed"}
WINDOW = {"accumulate_grad_batches": 2}
TRAININGS = {
    "a penalty on what is left to the root": Training(Penalised, ROOT),
    "graphs of weights that are kept": Training(KeepsGraphs),
    "parameters that are held weakly": Training(KeepsWeakly),
    "a result multiplied by 0 on a rank": Training(Skips),
    **{f"held: {way}": Training(by_way(Holds, way), ROOT, oracle=Holds) for way in WAYS},
    "held: what autocast does not round": Training(HoldsEmbedding, ROOT, MIXED, tolerance=0.02),
    **{
        f"written: {way}, {'units' if units else 'root'}": Training(by_way(Teaches, way), chosen, oracle=Teaches)
        for way in (*WRITES, HELD)
        for units, chosen in enumerate((ROOT, UNITS))
        # Between units parameters are DTensors, which a held one only tells of.
        if way != HELD or not units
    },
    "written: units stay": Training(Teaches, {**UNITS, "reshard_after_forward": False}),
    "written: gathered in their own dtype": Training(Teaches, {**ROOT, "gather_dtype": None}, MIXED),
    "written: by a block to its own weights": Training(Clamps, UNITS),
    "written: traded": Training(Trades, ROOT),
    **{
        f"gradients: {cls.__name__}": Training(cls)
        for cls in (SlopePenalised, CalledAgain, NowAndThen, Perturbed, Checkpointed, Critic, PenaltyAlone, TwoLosses)
    },
    "gradients: GraphOfBackward": Training(GraphOfBackward, by_ddp=False),
    "bf16-mixed": Training(Normalised, trainer=MIXED),
    "bf16-mixed, gathered wide": Training(Normalised, {"gather_dtype": None}, MIXED),
    "bf16-mixed, gradients whole": Training(Normalised, {"shard_gradients": False}, {**MIXED, **WINDOW}),
    # On CPUs Lightning makes "16-mixed" bf16, with a warning, under every strategy.
    "16-mixed": Training(zoo.MLP, trainer={"precision": "16-mixed"}),
    "bf16-true": Training(zoo.MLP, trainer={"precision": "bf16-true"}),
    "64-true": Training(zoo.MLP, trainer={"precision": "64-true"}, tolerance=FP64),
}
# More ways to shard, and more ranks: each kind of gradients of gradients with each way, once at two or three ranks.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "units stay": ({"reshard_after_forward": False}, {}),
    "one by one": ({"wrap": ["Linear"]}, {}),
    "accumulated": ({}, WINDOW),
    "accumulated whole": ({"shard_gradients": False}, WINDOW),
}
VARIED = {
    f"{name}, {variant}": Training(case.module, *chosen, by_ddp=case.by_ddp)
    for name, case in TRAININGS.items()
    if name.startswith("gradients:")
    for variant, chosen in VARIANTS.items()
    if not (issubclass(case.module, ManualScores) and "accumulated" in variant)  # type: ignore[arg-type]
}


def compare(name: str) -> tuple[float, float, float]:
    """How far parameters and losses are from the oracle's, and how far the oracle's parameters have moved."""
    case = {**TRAININGS, **VARIED}[name]
    make = case.oracle or case.module

    def train_as_oracle() -> Any:
        return train(make, ddp() if case.by_ddp else None, whole_batch=not case.by_ddp, **case.trainer)

    expected = reference((__name__, make, case.by_ddp, str(case.trainer)), train_as_oracle)
    actual = train(case.module, zero3(**case.strategy), **case.trainer)
    moved = max(
        float((a - b).abs().max()) for a, b in zip(expected.parameters[-1], expected.parameters[0], strict=True)
    )
    return largest_difference(actual, expected), largest_loss_difference(actual, expected), moved


def check(pool: RankPool, name: str, world_size: int) -> None:
    tolerance = {**TRAININGS, **VARIED}[name].tolerance
    for parameters, losses, moved in pool.run(world_size, compare, name):
        assert parameters <= tolerance
        assert losses <= 10 * tolerance
        assert moved > 1e-3


# Others that say the same in another way.
SLOW = {
    *(f"held: {way}" for way in ("dict", "closure", "partial")),
    *(f"written: {way}" for way in ("foreach, root", "by data.mul_(), root", "in place, units", "by data =, units")),
    *(f"gradients: {cls}" for cls in ("NowAndThen", "Perturbed", "Checkpointed", "PenaltyAlone", "TwoLosses")),
    "bf16-mixed, gathered wide",
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name not in SLOW, TRAININGS))
def test_trains_as_ddp_does(pool: RankPool, name: str) -> None:
    check(pool, name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_ranks_and_ways_to_shard_train_as_ddp_does(pool: RankPool, world_size: int) -> None:
    names = [name for number, name in enumerate(VARIED) if 2 + number % 2 == world_size]
    for name in [
        *names,
        *(name for name in TRAININGS if world_size != 2 and name.startswith(("written", "gradients"))),
    ]:
        check(pool, name, world_size)


# What no comparison of parameters shows.


class LooksAt(Holds):
    """Looks at all of a held weight that needs no values."""

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.penalty[0].args[0][0]  # type: ignore[attr-defined]
        own = self.blocks[0].linear.weight
        self.seen = weight.shape == own.shape and weight.dtype == own.dtype and weight.requires_grad
        self.seen = self.seen and weight.grad is own.grad and weight.grad is not None
        self.seen = self.seen and torch.equal(weight.full_tensor(), own.full_tensor())
        self.seen = self.seen and type(copy.deepcopy(weight)) is type(own) and "DTensor" in repr(weight)
        # Its memory is that of one element.
        with torch._C.DisableTorchFunctionSubclass():
            self.memory = isinstance(weight, HeldParameter) and weight.untyped_storage().nbytes()


def look() -> tuple[bool, int]:
    module: Any = train(LooksAt, zero3(**ROOT)).module
    return module.seen, module.memory


def test_a_held_weight_tells_what_it_is_and_keeps_no_memory(pool: RankPool) -> None:
    assert pool.run(2, look) == [(True, 4)] * 2


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


def compare_compiled() -> list[tuple[float, int, int]]:
    """How far from the same without a compiler; graphs that were made by one; and where a graph had to be broken."""
    found, expected = [], train(lambda: odd.Blocks(zoo.adamw), ddp(), validate=True)
    counters = torch._dynamo.utils.counters
    for module, wrap in ((odd.CompiledBlocks, None), (odd.WrappedBlocks, ["Block"])):
        torch._dynamo.reset()
        counters.clear()
        actual = train(lambda module=module: module(zoo.adamw), zero3(wrap=wrap), validate=True)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        found.append((largest_difference(actual, expected), graphs, breaks))
    torch._dynamo.reset()
    return found


def test_blocks_are_compiled_as_a_whole(pool: RankPool) -> None:
    for found in pool.run(2, compare_compiled):
        for difference, graphs, breaks in found:
            assert difference <= FP32
            assert graphs > 0 and breaks == 0
