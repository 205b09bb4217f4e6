"""Parameters in 16 bits are stepped in 32: as by an optimizer over copies in fp32 that are rounded after each step."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS
from tests.comparing import assert_same
from tests.distributed.engines import (
    adafactor,
    adagrad,
    adamw,
    backward,
    clip_gradients_by_norm,
    make_engine,
    perceptron,
    sgd,
    squared_error,
)
from tests.pool import RankPool

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [BF16, FP16]
WORLD_SIZES = [1, 2, 3]
Make = Callable[[Any], Optimizer]


class ByHand:
    """Training in one process on all ranks' data, its masters kept by hand."""

    def __init__(self, module: nn.Module, make: Make) -> None:
        self.parameters = list(module.parameters())
        self.module = module
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.optimizer = make(self.masters)

    def step(self, first: int, ranks: int, clip: float | None = None) -> None:
        for master, gradient in zip(self.masters, mean_gradients(self.module, first, ranks), strict=True):
            master.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def mean_gradients(module: nn.Module, first: int, ranks: int) -> list[Tensor]:
    """In fp32, of gradients in 16 bits; in fp16 each is divided first, as its sum might overflow."""
    total: list[Tensor] = []
    for rank in range(ranks):
        gradients = torch.autograd.grad(squared_error(module, first + rank), list(module.parameters()))
        if gradients[0].dtype == FP16:
            gradients = tuple(gradient * (1 / ranks) for gradient in gradients)
        wide = [gradient.float() for gradient in gradients]
        total = wide if not total else [one + other for one, other in zip(total, wide, strict=True)]
    return total if gradients[0].dtype == FP16 else [gradient * (1 / ranks) for gradient in total]


def step(engine: Any, module: nn.Module, optimizer: Optimizer, first: int, clip: float | None = None) -> None:
    optimizer.zero_grad()
    backward(engine, squared_error(module, first + dist.get_rank()))
    if clip is not None:
        clip_gradients_by_norm(optimizer, clip)
    optimizer.step()


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    """Whole, by position. Collective."""
    masters = optimizer.state_dict()[MASTER_WEIGHTS]
    assert all(master.dtype == torch.float32 for master in masters.values())
    return [masters[index] for index in sorted(masters)]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    # Rounding in fp32; in 16 bits it would be a thousand times as much.
    assert_same(actual, expected, rtol=2e-5, atol=1e-6)


def trains_as_by_hand(make: Make, dtype: torch.dtype, clip: float | None, policy: dict[str, Any]) -> None:
    ranks = dist.get_world_size()
    module, reference = perceptron(dtype), ByHand(perceptron(dtype), make)
    optimizer = make(module.parameters())
    engine = make_engine(module, optimizer, **policy)
    for number in range(6):
        step(engine, module, optimizer, 10 * number, clip)
        reference.step(10 * number, ranks, clip)
        masters = masters_of(optimizer)
        assert_close(masters, reference.masters)
        assert_same(list(module.parameters()), [master.to(dtype) for master in masters])
    state = optimizer.state_dict()["state"]
    for index, master in enumerate(reference.masters):
        for key, value in reference.optimizer.state[master].items():
            assert state[index][key].dtype == value.dtype
            torch.testing.assert_close(state[index][key], value, rtol=1e-4, atol=1e-6, check_stride=False)


ELEMENT, PARAMETER = {"partition": "element"}, {"partition": "parameter"}
CASES: dict[str, tuple[Make, torch.dtype, float | None, dict[str, Any]]] = {
    **{f"adamw, {dtype}, element": (adamw, dtype, None, ELEMENT) for dtype in DTYPES},
    **{f"adamw, {dtype}, parameter": (adamw, dtype, None, PARAMETER) for dtype in DTYPES},
    **{f"sgd, {dtype}, clipped": (sgd, dtype, 0.05, {}) for dtype in DTYPES},
    **{f"adafactor, {dtype}": (adafactor, dtype, None, {}) for dtype in DTYPES},
    "adagrad, whose state is there before its shards": (adagrad, BF16, None, {}),
    "sgd, one bucket": (sgd, BF16, None, {"bucket_cap_mb": 1.0, "master_weights": True}),
    "adamw, parameter, clipped": (adamw, BF16, 0.05, PARAMETER),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 2 + number % 2) for number, name in enumerate(CASES)), *((name, 1) for name in list(CASES)[:1])],
)
def test_trains_as_with_masters_kept_by_hand(pool: RankPool, name: str, world_size: int) -> None:
    pool.run(world_size, trains_as_by_hand, *CASES[name])


def small_updates(dtype: torch.dtype, policy: dict[str, Any]) -> tuple[float, float]:
    """After 64 steps, each a 32nd of what would change a weight of 1."""
    module = nn.Linear(7, 3, bias=False).to(dtype)
    nn.init.ones_(module.weight)
    spacing = torch.finfo(dtype).eps
    optimizer = torch.optim.SGD(module.parameters(), lr=spacing / 64)
    engine = make_engine(module, optimizer, **policy)
    for _ in range(64):
        optimizer.zero_grad()
        backward(engine, module.weight.sum())
        optimizer.step()
    assert module.weight.unique().numel() == 1
    return module.weight[0, 0].item(), 1 - spacing


@pytest.mark.parametrize(
    ("dtype", "policy", "world_size"),
    [(BF16, ELEMENT, 2), (FP16, ELEMENT, 3), (BF16, PARAMETER, 3), (FP16, PARAMETER, 1)],
    ids=str,
)
def test_updates_too_small_for_16_bits_add_up(
    pool: RankPool, dtype: torch.dtype, policy: dict[str, Any], world_size: int
) -> None:
    for actual, expected in pool.run(world_size, small_updates, dtype, policy):
        assert actual == expected
    for actual, _ in pool.run(world_size, small_updates, dtype, {**policy, "master_weights": False}):
        assert actual == 1.0


def clamp(module: nn.Module) -> None:
    module[0].weight.data.clamp_(-0.1, 0.1)


def copy_into(module: nn.Module) -> None:
    with torch.no_grad():
        module[2].bias[1:3].copy_(torch.tensor([0.25, -3.0]))


def replace(module: nn.Module) -> None:
    module[2].weight.data = module[2].weight.data.flip(0) * 2


def replace_by_the_same(module: nn.Module) -> None:
    module[2].weight.data = module[2].weight.data.clone()


def transpose(module: nn.Module) -> None:
    """The same values, and other strides."""
    module[0].weight.data = module[0].weight.data.t().contiguous().t()


def load(module: nn.Module) -> None:
    module.load_state_dict({key: value * 0.5 for key, value in module.state_dict().items()})


def zero(module: nn.Module) -> None:
    """Negative zeros where weights were negative."""
    for parameter in module.parameters():
        parameter.data.mul_(0)


CHANGES = [clamp, copy_into, replace, replace_by_the_same, transpose, load, zero]


def changed_between_steps(change: Callable[[nn.Module], None], policy: dict[str, Any]) -> None:
    module = perceptron(BF16)
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
    for master, old, then, now in zip(masters_of(optimizer), masters, before, after, strict=True):
        assert torch.equal(master, torch.where(then == now, old, now.float()))
    assert_same(list(module.parameters()), after)
    step(engine, module, optimizer, 100)
    assert_same(list(module.parameters()), [master.to(BF16) for master in masters_of(optimizer)])


@pytest.mark.parametrize(
    ("change", "policy", "world_size"),
    [
        *((change, (ELEMENT, PARAMETER)[number % 2], 2) for number, change in enumerate(CHANGES)),
        *((change, (PARAMETER, ELEMENT)[number % 2], 3) for number, change in enumerate(CHANGES)),
        (copy_into, ELEMENT, 1),
    ],
)
def test_weights_changed_from_outside_are_taken_over_and_others_keep_their_bits(
    pool: RankPool, change: Callable[[nn.Module], None], policy: dict[str, Any], world_size: int
) -> None:
    pool.run(world_size, changed_between_steps, change, policy)


Saved = tuple[dict[str, Tensor], bytes]
# The same samples for any number of ranks: each rank's gradient is of the mean over its part.
STEPS_BEFORE, STEPS_AFTER = (0, 1, 2), (3, 4)


def save(make: Make, dtype: torch.dtype, policy: dict[str, Any], closed: bool) -> Saved:
    module = perceptron(dtype)
    optimizer = make(module.parameters())
    engine = make_engine(module, optimizer, **policy)
    for number in STEPS_BEFORE:
        optimizer.zero_grad()
        backward(engine, squared_error(module, number))
        optimizer.step()
    if closed:
        engine.close()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return {key: value.clone() for key, value in module.state_dict().items()}, file.getvalue()


def read(saved: bytes) -> dict[str, Any]:
    # What Lightning and torch read by default holds nothing but tensors and plain values.
    return torch.load(io.BytesIO(saved), weights_only=True)


def go_on(make: Make, dtype: torch.dtype, policy: dict[str, Any], saved: Saved) -> tuple[list[Tensor], bytes]:
    torch.manual_seed(5)
    module = nn.Sequential(*(copy.deepcopy(layer) for layer in perceptron(dtype)))
    optimizer = make(module.parameters())
    engine = make_engine(module, optimizer, **policy)
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(read(saved[1]))
    assert_same(optimizer.state_dict(), read(saved[1]))
    for number in STEPS_AFTER:
        optimizer.zero_grad()
        backward(engine, squared_error(module, number))
        optimizer.step()
    return masters_of(optimizer), b""


ROUTES = [(1, 1), (1, 2), (2, 2), (2, 3), (3, 1), (3, 2)]


@pytest.mark.parametrize(("source", "target"), ROUTES)
@pytest.mark.parametrize(
    ("make", "policies", "closed"),
    [(adamw, (ELEMENT, PARAMETER), False), (adafactor, ({}, {}), True)],
    ids=["adamw, in training", "adafactor, after training"],
)
def test_saved_master_weights_keep_their_bits(
    pool: RankPool, make: Make, policies: tuple[dict[str, Any], ...], closed: bool, source: int, target: int
) -> None:
    saved = pool.run(source, save, make, BF16, policies[0], closed)
    assert all(one[1] == saved[0][1] for one in saved)
    masters = read(saved[0][1])[MASTER_WEIGHTS]
    for master, parameter in zip(masters.values(), saved[0][0].values(), strict=True):
        assert torch.equal(master.to(BF16), parameter) and not torch.equal(master, parameter.float())
    reference = ByHand(perceptron(BF16), make)
    for number in (*STEPS_BEFORE, *STEPS_AFTER):
        reference.step(number, 1)
    for found, _ in pool.run(target, go_on, make, BF16, policies[1], saved[0]):
        assert_close(found, reference.masters)


def test_other_strategies_pass_over_master_weights(pool: RankPool) -> None:
    parameters, saved = pool.run(2, save, adamw, BF16, {}, False)[0]
    module, expected = perceptron(BF16), perceptron(BF16)
    for one in (module, expected):
        one.load_state_dict(parameters)
    optimizer, other = adamw(module.parameters()), adamw(expected.parameters())
    optimizer.load_state_dict(read(saved))
    other.load_state_dict({key: value for key, value in read(saved).items() if key != MASTER_WEIGHTS})
    for one, opt in ((module, optimizer), (expected, other)):
        squared_error(one, 3).backward()
        opt.step()
    assert_same(list(module.parameters()), list(expected.parameters()))
    assert all(state["exp_avg"].dtype == BF16 for state in optimizer.state.values())


def without_masters(saved: Saved) -> None:
    """State of another strategy: masters begin at the parameters."""
    module = perceptron(BF16)
    module.load_state_dict(saved[0])
    optimizer = adamw(module.parameters())
    make_engine(module, optimizer)
    optimizer.load_state_dict({key: value for key, value in read(saved[1]).items() if key != MASTER_WEIGHTS})
    assert_same(masters_of(optimizer), [parameter.detach().float() for parameter in module.parameters()])
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32


def test_state_without_master_weights_can_be_loaded(pool: RankPool) -> None:
    pool.run(2, without_masters, pool.run(2, save, adamw, BF16, {}, False)[0])


def loaded_weights_win(saved: Saved) -> None:
    """Weights that are not what the loaded masters round to: someone has replaced them on purpose."""
    module = perceptron(BF16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer)
    masters = read(saved[1])[MASTER_WEIGHTS]
    optimizer.load_state_dict({**optimizer.state_dict(), MASTER_WEIGHTS: masters})
    module.load_state_dict({**saved[0], "2.bias": saved[0]["2.bias"] + 1})
    optimizer.zero_grad()
    backward(engine, 0 * squared_error(module, 0))
    optimizer.step()
    changed = [name == "2.bias" for name in saved[0]]
    for index, (master, name) in enumerate(zip(masters_of(optimizer), saved[0], strict=True)):
        expected = (saved[0][name] + 1).float() if changed[index] else masters[index]
        assert torch.equal(master, expected)


def test_weights_loaded_after_the_masters_win_where_they_differ(pool: RankPool) -> None:
    pool.run(2, loaded_weights_win, pool.run(2, save, adamw, BF16, {}, False)[0])


def trained_again() -> None:
    module, reference = perceptron(BF16), ByHand(perceptron(BF16), adamw)
    optimizer = adamw(module.parameters())
    for first in (0, 50):
        engine = make_engine(module, optimizer, bucket_cap_mb=1e-6 if first else 1.0)
        for number in range(first, first + 30, 10):
            step(engine, module, optimizer, number)
            reference.step(number, dist.get_world_size())
        engine.close()
        assert_close(masters_of(optimizer), reference.masters)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_second_training_goes_on_with_the_masters_of_the_first(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, trained_again)


def copied_in_training() -> None:
    module = perceptron(BF16)
    optimizer = adamw(module.parameters())
    engine = make_engine(module, optimizer)
    step(engine, module, optimizer, 0)
    copied = copy.deepcopy(optimizer)
    assert_same(copied.state_dict(), optimizer.state_dict())
    step(engine, module, optimizer, 10)
    # Its masters are its own.
    assert not torch.equal(masters_of(copied)[0], masters_of(optimizer)[0])


def test_a_copy_has_masters_of_its_own(pool: RankPool) -> None:
    pool.run(2, copied_in_training)


class Mixed(nn.Module):
    """Only what is sharded and has 16 bits gets masters."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(12, 5).to(BF16)
        self.wide = nn.LayerNorm(5)
        self.short = nn.Linear(5, 3).to(FP16)
        self.alias = nn.Parameter(self.short.bias.data)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.short(self.wide(self.narrow(inputs.to(BF16)).float()).to(FP16)) + self.alias


def mixed() -> tuple[dict[int, torch.dtype], list[torch.dtype]]:
    module = Mixed()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    loss = module(torch.ones(2, 12)).float().sum()
    backward(engine, loss)
    optimizer.step()
    saved = optimizer.state_dict()
    names = [name for name, _ in module.named_parameters()]
    assert [names[index] for index in sorted(saved[MASTER_WEIGHTS])] == ["narrow.weight", "narrow.bias", "short.weight"]
    assert all(master.dtype == torch.float32 for master in saved[MASTER_WEIGHTS].values())
    kept = {name: saved["state"][index]["momentum_buffer"].dtype for index, name in enumerate(names)}
    wide = {"alias": FP16, "short.bias": FP16}
    assert kept == {name: wide.get(name, torch.float32) for name in names}


def test_only_shards_in_16_bits_have_masters(pool: RankPool) -> None:
    pool.run(2, mixed)


def plain(make: Make, dtype: torch.dtype, policy: dict[str, Any]) -> None:
    """Without masters: as an ordinary optimizer over parameters in 16 bits."""
    ranks = dist.get_world_size()
    module, twin = perceptron(dtype), perceptron(dtype)
    optimizer, twins = make(module.parameters()), make(twin.parameters())
    engine = make_engine(module, optimizer, master_weights=False, **policy)
    for number in range(4):
        step(engine, module, optimizer, 10 * number)
        gradients = [
            torch.autograd.grad(squared_error(twin, 10 * number + rank), list(twin.parameters()))
            for rank in range(ranks)
        ]
        for index, parameter in enumerate(twin.parameters()):
            parts = [of_rank[index] for of_rank in gradients]
            if dtype == FP16:
                parts = [part * (1 / ranks) for part in parts]
            total = sum(parts[1:], start=parts[0])
            parameter.grad = total if dtype == FP16 else total * (1 / ranks)
        twins.step()
        for one, other in zip(module.parameters(), twin.parameters(), strict=True):
            # At most the last bit: vectorised and plain arithmetic may round differently.
            torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    saved, expected = optimizer.state_dict(), twins.state_dict()
    assert MASTER_WEIGHTS not in saved and saved.keys() == expected.keys()
    for index, entries in expected["state"].items():
        assert {key: value.dtype for key, value in saved["state"][index].items()} == {
            key: value.dtype for key, value in entries.items()
        }


@pytest.mark.parametrize(
    ("make", "policy", "dtype", "world_size"),
    [
        (adamw, ELEMENT, BF16, 2),
        (adamw, PARAMETER, FP16, 3),
        (adamw, ELEMENT, FP16, 1),
        (sgd, {}, FP16, 2),
        (sgd, {}, BF16, 3),
        (adafactor, {}, BF16, 3),
        (adafactor, {}, FP16, 2),
    ],
)
def test_without_masters_it_steps_in_16_bits(
    pool: RankPool, make: Make, policy: dict[str, Any], dtype: torch.dtype, world_size: int
) -> None:
    pool.run(world_size, plain, make, dtype, policy)
