"""Gradients that travel in 16 bits are what they are without, but for rounding."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.ddp.reducers import register_comm_hook
from tests.comparing import distance
from tests.pool import RankPool

STEPS = 5


def gradients(name: str | None, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3))
    ddp = DistributedDataParallel(module, bucket_cap_mb=3 / 2**10, **options)
    if name is not None:
        register_comm_hook(ddp, name)
    for step in range(STEPS):
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        (ddp(torch.randn(8, 30, generator=generator)) - 0.3).pow(2).mean().backward()
    return [copy.deepcopy(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]


def distance_from_exact(name: str, options: dict[str, Any]) -> tuple[bool, float, Any]:
    exact, actual = gradients(None, options), gradients(name, options)
    kept = all(one.dtype == torch.float32 for one in actual)
    difference = torch.stack([(a - b).norm() for a, b in zip(exact, actual, strict=True)]).norm()
    return kept, float(difference / torch.stack([one.norm() for one in exact]).norm()), actual


@pytest.mark.parametrize("as_view", [True, False], ids=["as view", "not as view"])
@pytest.mark.parametrize(("name", "precision"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_sixteen_bits_are_close_and_gradients_keep_their_dtype(
    pool: RankPool, name: str, precision: float, as_view: bool
) -> None:
    options = {"gradient_as_bucket_view": as_view}
    (kept, difference, first), (_, _, second) = pool.run(2, distance_from_exact, name, options)
    assert kept
    # Each gradient is rounded, and their sum is.
    assert precision / 10 < difference < 2 * precision
    assert distance(first, second) == 0
