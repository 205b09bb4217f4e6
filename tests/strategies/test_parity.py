"""Parameters and losses equal those of a single process on the whole batch, or of DDP, step by step.

With ``--device`` the trainings are those that a device may do otherwise than another.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import CASES, EQUAL, FP32, sgd
from tests.strategies.late import late
from tests.strategies.parity import Run, ddp, largest_difference, train, zero1, zero3
from tests.strategies.ways import (
    WAYS,
    WAYS_ON_A_DEVICE,
    compare,
    error_of,
    expected,
    make,
    oracle,
    plan,
    train_as_oracle,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function not in (test_trains_as_the_oracle_does, test_what_cannot_be_trained_says_so):
        return
    on_device, quick = metafunc.config.getoption("--device") is not None, set()
    is_equal = metafunc.function is test_trains_as_the_oracle_does
    trainings = []
    for name, way, size, is_quick in plan(on_device):
        if (expected(CASES[name], (WAYS | WAYS_ON_A_DEVICE)[way]) == EQUAL) == is_equal:
            trainings.append((name, way, size))
            quick |= {(name, way, size)} if is_quick else set()
    metafunc.parametrize(("name", "way", "world_size"), slow_unless(lambda *one: one in quick, trainings))


def test_trains_as_the_oracle_does(pool_of_device: RankPool, name: str, way: str, world_size: int) -> None:
    found = pool_of_device.run(world_size, compare, name, way)
    for parameters, losses, _ in found:
        assert parameters <= CASES[name].tolerance
        assert losses <= 10 * CASES[name].tolerance
    (WAYS | WAYS_ON_A_DEVICE)[way].check(name, [seen for _, _, seen in found])


def test_what_cannot_be_trained_says_so(pool_of_device: RankPool, name: str, way: str, world_size: int) -> None:
    text = expected(CASES[name], (WAYS | WAYS_ON_A_DEVICE)[way])
    errors = pool_of_device.run(world_size, error_of, name, way)
    if pool_of_device.device == "cuda":
        pool_of_device.rejoin()
    for error in errors:
        assert text in error


# A case of each tolerance.
SEEN = list({case.tolerance: name for name, case in reversed(CASES.items()) if not case.needs}.values())


def train_with_scaled_gradients(name: str) -> list[float]:
    """How far a training gets from the oracle whose gradients are doubled, or halved, after they were clipped."""
    right, make_right = oracle(name), make(name)

    def make_wrong(factor: float) -> Any:
        module = make_right()
        clip = module.configure_gradient_clipping

        def clip_and_scale(*args: Any, **kwargs: Any) -> None:
            clip(*args, **kwargs)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor

        module.configure_gradient_clipping = clip_and_scale
        return module

    return [
        largest_difference(train_as_oracle(name, lambda factor=factor: make_wrong(factor)), right)
        for factor in (2.0, 0.5)
    ]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("mlp", "bf16-true"), SEEN))
def test_every_tolerance_sees_gradients_that_are_doubled_or_halved(pool: RankPool, name: str) -> None:
    for differences in pool.run(2, train_with_scaled_gradients, name):
        assert min(differences) > 5 * CASES[name].tolerance


# What travels in 16 bits, by strategy: it must round, and do nothing else.
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "reduced": ("zero1", {"comm_dtype": torch.bfloat16}),
    "reduced, exposed": ("zero1", {"comm_dtype": "bf16", "expose_gradients": True}),
    "gathered": ("zero1", {"gather_dtype": "bf16"}),
    "gathered, whole parameters": ("zero1", {"gather_dtype": "bf16", "partition": "parameter"}),
    "both": ("zero1", {"comm_dtype": "bf16", "gather_dtype": "bf16"}),
    "both, in groups": ("zero1", {"comm_dtype": "bf16", "gather_dtype": "bf16", "shard_group": 1}),
    "reduced, accumulated in shards": ("zero1", {"comm_dtype": "bf16", "shard_gradients": True}),
    "zero3, reduced": ("zero3", {"comm_dtype": "bf16"}),
}
# What is late of zero3_custom takes the place of what narrows.
PROMPT_AND_LATE = {"zero1": (zero1, late), "zero3": (zero3, zero3)}


class HalfOfAll(zoo.Attention):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) * 0.5


def train_on_narrow_wires(name: str) -> tuple[float, float, float]:
    """How far from ``ddp``, how far from that where transfers arrive late, and how far halved gradients would be."""
    strategy, policy = WIRES[name]

    def trained(module: type[zoo.Zoo], chosen: Any) -> Run:
        return train(lambda: module(sgd), chosen, accumulate_grad_batches=2)

    expected, wrong = trained(zoo.Attention, ddp()), trained(HalfOfAll, ddp())
    prompt, slow = (trained(zoo.Attention, kind(**policy)) for kind in PROMPT_AND_LATE[strategy])
    return tuple(largest_difference(*pair) for pair in ((prompt, expected), (slow, prompt), (wrong, expected)))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("both", "zero3, reduced"), WIRES))
def test_narrow_wires_round_and_do_nothing_else(pool_of_device: RankPool, name: str, world_size: int) -> None:
    for rounded, apart, halved in pool_of_device.run(world_size, train_on_narrow_wires, name):
        assert 1e-6 < rounded < halved / 5
        assert apart <= FP32
