"""``zero3_custom``: parameters that code has held since before the training, and writes within a step, act.

Both act as under ``ddp``, or an error names the parameter.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.zero3.held_parameters import HeldParameter
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, train, zero3
from tests.strategies.test_zero3_errors import Blocks, message_of

ROOT, UNITS = {"min_num_params": 10**9}, {"min_num_params": 0}
"""All parameters are gathered for a whole step; or those of blocks by themselves."""


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
    """Penalises a weight of a block through what it has held since it was made."""

    way = "list"

    def build(self) -> None:
        super().build()
        # In a list: a module among the attributes would be one of this one's own.
        self.penalty = [WAYS[self.way](self.blocks[0].linear.weight)]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.1 * self.penalty[0]()


def holding(way: str) -> type[Holds]:
    return type("Holds", (Holds,), {"way": way})


def penalised(way: str) -> float:
    return largest_difference(train(holding(way), zero3(**ROOT)), train(holding(way), ddp()))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_held_is_the_modules_own(pool: RankPool, way: str) -> None:
    assert max(pool.run(2, penalised, way)) <= FP32


def penalised_in_bf16() -> float:
    class HoldsEmbedding(zoo.TiedLanguageModel):
        def build(self) -> None:
            super().build()
            self.held = list(self.parameters())

        def compute_loss(self, batch: Tensor) -> Tensor:
            return super().compute_loss(batch) + 0.1 * sum(p.square().sum() for p in self.held if p.dim() == 1)

    in_bf16 = {"precision": "bf16-mixed"}
    return largest_difference(train(HoldsEmbedding, zero3(**ROOT), **in_bf16), train(HoldsEmbedding, ddp(), **in_bf16))


def test_what_autocast_does_not_round_is_held_exactly(pool: RankPool) -> None:
    assert max(pool.run(2, penalised_in_bf16)) <= 0.02


class ReadsBetween(Blocks):
    """Reads a held weight when a step has ended."""

    def build(self) -> None:
        super().build()
        self.held = [self.head.weight]

    def on_train_batch_end(self, *_: Any) -> None:
        float(self.held[0].norm())


def said_where_values_are_elsewhere() -> list[str]:
    return [message_of(Holds, zero3(**UNITS)), message_of(ReadsBetween, zero3(**ROOT))]


def test_a_held_weight_without_values_says_whose_it_is(pool: RankPool) -> None:
    for in_step, between in pool.run(2, said_where_values_are_elsewhere):
        assert "'blocks.0.linear.weight'" in in_step and "self.blocks.0.linear.weight" in in_step
        assert "'head.weight'" in between and "full_parameters()" in between


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
    "through what is held": lambda teacher, student: None,
}


class Teaches(Blocks):
    """Keeps a teacher's moving average in ``training_step``, as BYOL, MoCo and DINO do."""

    way = "in place"

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.held = list(self.teacher.parameters())

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.held if self.way == "through what is held" else list(self.teacher.parameters())
            WRITES["in place" if self.way == "through what is held" else self.way](
                teacher, list(self.blocks.parameters())
            )
            target = batch
            for block in self.teacher:
                target = block(target)
        return super().compute_loss(batch) + (target - self.blocks[0](batch)).pow(2).mean()


def teaching(way: str) -> type[Teaches]:
    return type("Teaches", (Teaches,), {"way": way})


def taught(way: str, arguments: dict[str, Any]) -> tuple[float, float]:
    """How far parameters are from those of ``ddp``, and how far the teacher has moved."""
    run, expected = train(teaching(way), zero3(**arguments)), train(teaching(way), ddp())
    first, last = expected.parameters[0][-1], expected.parameters[-1][-1]
    return largest_difference(run, expected), float((last - first).abs().max())


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("way", "arguments"),
    [
        *((way, ROOT) for way in WRITES),
        # Between units parameters are DTensors, which a held one only tells of.
        *((way, UNITS) for way in WRITES if way != "through what is held"),
        ("in place", {**UNITS, "reshard_after_forward": False}),
    ],
)
def test_what_a_step_writes_is_kept(pool: RankPool, way: str, arguments: dict[str, Any], world_size: int) -> None:
    for difference, moved in pool.run(world_size, taught, way, arguments):
        assert difference <= FP32
        assert moved > 1e-3


class WritesInForward(Blocks):
    """Each block keeps its weight within bounds in its own forward, where it is gathered."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, _: block.linear.weight.data.clamp_(-0.1, 0.1))


def clamped() -> tuple[float, float]:
    run, expected = train(WritesInForward, zero3(**UNITS)), train(WritesInForward, ddp())
    return largest_difference(run, expected), float(expected.parameters[-1][0].abs().max())


def test_what_a_block_writes_to_its_own_weights_is_kept(pool: RankPool) -> None:
    for difference, largest in pool.run(2, clamped):
        assert difference <= FP32
        assert largest < 0.15


class Reshapes(Blocks):
    def build(self) -> None:
        super().build()
        self.frozen = nn.Linear(zoo.FEATURES, 1).requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.frozen.weight.data = self.frozen.weight.data.flatten()
        return super().compute_loss(batch)


class WritesInEvaluation(Blocks):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)
        with torch.no_grad():
            self.blocks[0].linear.weight.mul_(2)


def said_of_writes() -> list[str]:
    def in_bf16(way: str) -> str:
        with pytest.raises(RuntimeError) as raised:
            train(teaching(way), zero3(**ROOT), precision="bf16-mixed")
        return str(raised.value)

    with pytest.raises(RuntimeError) as evaluated:
        train(WritesInEvaluation, zero3(**UNITS, reshard_after_forward=False), precision="bf16-mixed", validate=True)
    return [*(in_bf16(way) for way in WRITES), str(evaluated.value), message_of(Reshapes, zero3(**ROOT))]


def test_a_write_that_would_be_rounded_or_does_not_fit_names_the_parameter(pool: RankPool) -> None:
    for *rounded, evaluated, reshaped in pool.run(2, said_of_writes):
        assert "'blocks.0.linear.weight'" in evaluated and "torch.bfloat16" in evaluated
        for said in rounded:
            assert "'teacher.0.linear.weight'" in said and "torch.bfloat16" in said and "gather_dtype=None" in said
        assert "'frozen.weight'" in reshaped and "[12]" in reshaped and "[1, 12]" in reshaped


class Trades(Blocks):
    """Two frozen parameters trade their data in each step."""

    def build(self) -> None:
        super().build()
        self.pair = nn.ModuleList(nn.Linear(zoo.FEATURES, 1).requires_grad_(False) for _ in range(2))

    def compute_loss(self, batch: Tensor) -> Tensor:
        first, second = self.pair[0].weight, self.pair[1].weight
        first.data, second.data = second.data, first.data
        return super().compute_loss(batch) + self.pair[0](batch).pow(2).mean()


def traded() -> float:
    return largest_difference(train(Trades, zero3(**ROOT)), train(Trades, ddp()))


def test_data_is_traded_within_a_step(pool: RankPool) -> None:
    assert max(pool.run(2, traded)) <= FP32


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.pow(2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:
        return gradient * torch.ones(zoo.FEATURES, zoo.FEATURES)


class AppliesFunction(Blocks):
    def build(self) -> None:
        super().build()
        self.held = [self.blocks[0].linear.weight]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + Square.apply(self.held[0])


class LeavesAutocast(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.head(batch).square().mean()


def said_of_what_cannot_be_seen() -> list[str]:
    with pytest.raises(RuntimeError) as raised:
        train(LeavesAutocast, zero3(**ROOT), precision="bf16-mixed")
    return [message_of(AppliesFunction, zero3(**ROOT)), str(raised.value)]


def test_what_goes_by_a_held_weight_or_by_autocast_says_what_to_do(pool: RankPool) -> None:
    for function, autocast in pool.run(2, said_of_what_cannot_be_seen):
        assert "'blocks.0.linear.weight'" in function and "self.blocks.0.linear.weight" in function
        assert "gather_dtype=None" in autocast


def taught_in_bf16_as_the_error_says() -> float:
    in_bf16 = {"precision": "bf16-mixed"}
    expected = train(teaching("in place"), ddp(), **in_bf16)
    return largest_difference(train(teaching("in place"), zero3(**ROOT, gather_dtype=None), **in_bf16), expected)


def test_a_write_is_kept_where_parameters_are_gathered_in_their_own_dtype(pool: RankPool) -> None:
    assert max(pool.run(2, taught_in_bf16_as_the_error_says)) <= FP32
