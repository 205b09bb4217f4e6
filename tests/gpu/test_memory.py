"""What a rank holds and needs at most on a GPU, beside the formula."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parstrat.core.footprint import Training
from lightning_parstrat.core.footprint import zero3 as formula_of
from tests import devices
from tests.gpu.trainings import Layers, MostHeld, allocated, fit
from tests.pool import RankPool
from tests.strategies.cases import fused
from tests.strategies.parity import by_flag, zero3

WITHIN = 0.03
PER_PARAMETER = {"32-true": 16, "bf16-mixed": 16, "bf16-true": 18}
"""With Adam at world size 1: parameters, state, gradients, and in bf16-true master weights."""
CASTS = {"bf16-mixed": 2}
"""What autocast keeps of each weight from forward to backward, while the last step's gradients are still there."""


class Measured(NamedTuple):
    """Bytes; those of the device are 0 on CPU."""

    parameters: int
    held: int
    peak: int
    left: int


def let_libraries_allocate() -> None:
    """Workspaces of cuBLAS stay once they are there, for each thread that calls it: autograd's, too."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(512, 512, device=devices.device(), dtype=dtype)
        layer(torch.ones(8, 512, device=devices.device(), dtype=dtype, requires_grad=True)).sum().backward()


def measure(precision: str, width: int, number: int) -> Measured:
    let_libraries_allocate()
    before = allocated()
    measuring = MostHeld(before)
    # Buckets so small that those in flight hardly count.
    module = Layers(width, number, make_optimizer=fused)
    trainer = fit(module, by_flag(bucket_cap_mb=width * width * 4 / 2**20), precision=precision, callbacks=[measuring])
    parameters = sum(parameter.numel() for parameter in module.parameters())
    held, peak = measuring.held, measuring.peak
    del trainer, module, measuring
    return Measured(parameters, held, peak, allocated() - before)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PER_PARAMETER)
def test_memory_is_that_of_the_formula(ranks: RankPool, precision: str) -> None:
    size = (1024, 96) if ranks.device == "cuda" else (64, 24)
    (found,) = ranks.run(1, measure, precision, *size)
    formula = PER_PARAMETER[precision] * found.parameters
    assert found.parameters > 0
    if ranks.device == "cuda":
        most = formula + CASTS.get(precision, 0) * found.parameters
        assert abs(found.held - formula) <= WITHIN * formula, found
        assert abs(found.peak - most) <= WITHIN * most, (found, most)
        assert found.left <= WITHIN * found.parameters, found


def measure_zero3(width: int, number: int, precision: str) -> tuple[int, int, int, int]:
    """What the formula says of a rank between steps and at most, and what it held."""
    let_libraries_allocate()
    measuring = MostHeld(allocated())
    fit(Layers(width, number, make_optimizer=fused), zero3(), callbacks=[measuring], precision=precision)
    unit, ranks = width * width + width, dist.get_world_size()
    formula = formula_of(Training(parameters=number * unit, unit=unit, precision=precision, devices=ranks))
    return round(formula.held), round(formula.peak), measuring.held, measuring.peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_memory_of_two_ranks_is_that_of_the_formula(two: RankPool, precision: str) -> None:
    shape = (1024, 96) if two.device == "cuda" else (64, 8)
    for held, peak, found, most in two.run(2, measure_zero3, *shape, precision):
        assert 0 < held < peak
        if two.device == "cuda":
            assert abs(found - held) <= WITHIN * held, (found, held)
            assert most <= (1 + WITHIN) * peak, (most, peak)
