"""Dtypes of parameters, wires and shards: what is rounded is rounded once, and all else is done in fp32, as by hand."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS
from tests.comparing import assert_same
from tests.distributed.engines import (
    adafactor,
    adamw,
    backward,
    clip_gradients_by_norm,
    make_engine,
    perceptron,
    sgd,
    squared_error,
)
from tests.pool import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Make = Callable[[Any], Optimizer]
# Rounding in fp32; in 16 bits it would be a thousand times as much.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


class Row(NamedTuple):
    """A training, and what is done to it: ``policy`` are the strategy's arguments."""

    make: Make
    dtype: torch.dtype = FP32
    policy: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    clip: float | None = None
    exposed: bool = False


WHOLE, NO_MASTERS, EACH, ONE = (
    {"partition": "parameter"},
    {"master_weights": False},
    {"bucket_cap_mb": 1e-6},
    {"bucket_cap_mb": 1.0},
)
AWAY, HOME = {"comm_dtype": "bf16"}, {"gather_dtype": "bf16"}
ROWS = {
    "masters of bf16": Row(adamw, BF16),
    "masters of fp16, whole parameters": Row(adamw, FP16, WHOLE),
    "masters of whole parameters, clipped": Row(adamw, BF16, WHOLE, clip=0.05),
    "one bucket, masters asked for": Row(sgd, BF16, {**ONE, "master_weights": True}),
    "a matrix at a time": Row(adafactor, FP16),
    "no masters": Row(adamw, BF16, NO_MASTERS),
    "no masters, sgd": Row(sgd, FP16, NO_MASTERS),
    "no masters, a matrix at a time": Row(adafactor, BF16, NO_MASTERS),
    "narrow away, shown": Row(adamw, FP32, {**AWAY, **ONE}, exposed=True),
    "narrow both ways": Row(adamw, FP32, {**AWAY, **HOME, **EACH}),
}


class ByHand:
    """The row in one process on all ranks' data: its parameters as ranks see them, and what is stepped."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.module = perceptron(row.dtype)
        self.parameters = list(self.module.parameters())
        self.narrow = row.policy.get("master_weights") is False
        kept_in = row.dtype if self.narrow else FP32
        self.masters = [nn.Parameter(one.detach().to(kept_in, copy=True)) for one in self.parameters]
        self.optimizer = row.make(self.masters)

    def step(self, first: int, ranks: int) -> None:
        for master, gradient in zip(self.masters, self.mean_gradients(first, ranks), strict=True):
            master.grad = gradient
        if self.row.clip is not None:
            nn.utils.clip_grad_norm_(self.masters, self.row.clip)
        self.optimizer.step()
        wire = BF16 if "gather_dtype" in self.row.policy else self.row.dtype
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master.to(wire))

    def mean_gradients(self, first: int, ranks: int) -> list[Tensor]:
        """Summed in the masters' dtype; of fp16 each is divided before, as its sum might overflow."""
        total: list[Tensor] = []
        for rank in range(ranks):
            gradients = torch.autograd.grad(squared_error(self.module, first + rank), self.parameters)
            if self.row.dtype == FP16:
                gradients = tuple(one * (1 / ranks) for one in gradients)
            if "comm_dtype" in self.row.policy:
                gradients = tuple(one.bfloat16() for one in gradients)
            wide = [one.to(master.dtype) for one, master in zip(gradients, self.masters, strict=True)]
            total = [one + other for one, other in zip(total, wide, strict=True)] if total else wide
        return total if self.row.dtype == FP16 else [gradient * (1 / ranks) for gradient in total]


def step(engine: Any, module: nn.Module, optimizer: Optimizer, first: int, clip: float | None = None) -> None:
    optimizer.zero_grad()
    backward(engine, squared_error(module, first + dist.get_rank()))
    if clip is not None:
        clip_gradients_by_norm(optimizer, clip)
    optimizer.step()


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    """Whole, by position. Collective."""
    masters = optimizer.state_dict()[MASTER_WEIGHTS]
    assert all(master.dtype == FP32 for master in masters.values())
    return [masters[index] for index in sorted(masters)]


def make(row: Row) -> tuple[Any, nn.Module, Optimizer]:
    module = perceptron(row.dtype)
    optimizer = row.make(module.parameters())
    engine = make_engine(module, optimizer, **row.policy)
    engine.expose_gradients(row.exposed)
    return engine, module, optimizer


def saved_and_loaded(
    row: Row, engine: Any, module: nn.Module, optimizer: Optimizer
) -> tuple[Any, nn.Module, Optimizer]:
    """The training goes on in other objects, from what Lightning and torch read by default."""
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], file)
    engine.close()
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    engine, module, optimizer = make(row)
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), state)
    return engine, module, optimizer


def train_as_by_hand(row: Row) -> None:
    reference = ByHand(row)
    engine, module, optimizer = make(row)
    for number in range(4):
        if number == 2:
            engine, module, optimizer = saved_and_loaded(row, engine, module, optimizer)
        step(engine, module, optimizer, 10 * number, row.clip)
        reference.step(10 * number, dist.get_world_size())
    engine.gatherer.finish()
    # Without masters at most the last bits: vectorised and plain arithmetic may round differently.
    close = {"rtol": 2 * torch.finfo(row.dtype).eps, "atol": 1e-4} if reference.narrow else CLOSE
    saved = optimizer.state_dict()
    has_masters = not reference.narrow and (row.dtype != FP32 or "gather_dtype" in row.policy)
    assert (MASTER_WEIGHTS in saved) == has_masters
    if has_masters:
        masters = masters_of(optimizer)
        assert_same(masters, reference.masters, **close)
        wire = BF16 if "gather_dtype" in row.policy else row.dtype
        assert_same(list(module.parameters()), [one.to(wire).to(row.dtype) for one in masters])
        assert not any(torch.equal(one, one.to(wire).float()) for one in masters)
    else:
        assert_same(list(module.parameters()), reference.parameters, **close)
    for index, master in enumerate(reference.masters):
        expected = reference.optimizer.state[master]
        assert saved["state"][index].keys() == expected.keys()
        for key, value in expected.items():
            assert saved["state"][index][key].dtype == value.dtype
            if not reference.narrow:
                assert_same(saved["state"][index][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_as_by_hand(pool: RankPool, world_size: int, name: str) -> None:
    pool.run(world_size, train_as_by_hand, ROWS[name])


def copy_into(module: nn.Module) -> None:
    with torch.no_grad():
        module[2].bias[1:3].copy_(torch.tensor([0.25, -3.0]))


def replace(module: nn.Module) -> None:
    module[2].weight.data = module[2].weight.data.flip(0) * 2


def zero(module: nn.Module) -> None:
    """Negative zeros where weights were negative."""
    for parameter in module.parameters():
        parameter.data.mul_(0)


CHANGES = [copy_into, replace, zero]


def changed_between_steps(change: Callable[[nn.Module], None], dtype: torch.dtype, policy: dict[str, Any]) -> None:
    module = perceptron(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    engine = make_engine(module, optimizer, **policy)
    for number in range(3):
        step(engine, module, optimizer, 10 * number)
    masters = masters_of(optimizer)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    # There is something to lose: most masters are not what they round to.
    assert sum(int((m != p).sum()) for m, p in zip(masters, before, strict=True)) > 100
    change(module)
    after = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.zero_grad()
    backward(engine, 0 * squared_error(module, 0))
    optimizer.step()
    engine.gatherer.finish()
    for master, old, then, now in zip(masters_of(optimizer), masters, before, after, strict=True):
        assert torch.equal(master, torch.where(then == now, old, now.float()))
    wire = BF16 if "gather_dtype" in policy else dtype
    assert_same(list(module.parameters()), [one.to(wire).to(dtype) for one in after])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_changed_from_outside_are_taken_over_and_others_keep_their_bits(
    pool: RankPool, world_size: int
) -> None:
    policies: list[tuple[torch.dtype, dict[str, Any]]] = [(BF16, {}), (BF16, WHOLE), (FP32, HOME)]
    for number, change in enumerate(CHANGES):
        pool.run(world_size, changed_between_steps, change, *policies[(number + world_size // 3) % len(policies)])
