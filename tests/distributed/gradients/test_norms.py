"""Norms of parts of the gradients, which combine to the norm of all: what trainings do not reach."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_parstrat.distributed.gradients.clipping import norms_of, partial_norm, total_norm

CPU = torch.device("cpu")


def partial(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """What a rank contributes that owns ``tensors``."""
    return partial_norm(norms_of(tensors, norm_type, dtype), norm_type, CPU)


def norm_over(ranks: list[list[Tensor]], norm_type: float) -> Tensor:
    """What the ranks together find, each knowing its own gradients only."""
    is_double = any(tensor.dtype == torch.float64 for tensors in ranks for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    partials = torch.stack([partial(tensors, norm_type, dtype) for tensors in ranks])
    return total_norm(partials.amax(0) if math.isinf(norm_type) else partials.sum(0), norm_type, dtype)


def test_a_maximum_over_ranks_that_passes_over_nan_still_finds_it() -> None:
    bad = partial([torch.tensor([1.0, math.nan])], math.inf, torch.float32)
    good = partial([torch.tensor([2.0])], math.inf, torch.float32)
    # What a reduction by comparisons makes of both, in either order.
    for combined in (torch.where(bad > good, bad, good), torch.where(good > bad, good, bad)):
        assert math.isnan(total_norm(combined, math.inf, torch.float32))


def test_neither_16_bits_nor_powers_overflow_or_swallow_small_terms() -> None:
    for dtype, norm_type in product((torch.bfloat16, torch.float16), (1.0, 2.0, 3.0)):
        # The sum of squares is beyond float16; its terms, added in bfloat16, would stop counting after some hundred.
        tensors = [torch.full((4096,), 1024.0, dtype=dtype)]
        expected = 1024 * 8192 ** (1 / norm_type)
        assert norm_over([tensors, tensors], norm_type).item() == pytest.approx(expected, rel=1e-5)
    large = [torch.full((8,), 2.0**60, dtype=torch.bfloat16)]
    assert norm_over([large], 2.0).item() == pytest.approx(2.0**60 * math.sqrt(8), rel=1e-5)
    for norm_type, value in product((3.0, 8.0), (1e-20, 1e15)):
        found = norm_over([[torch.tensor([value])], [torch.tensor([value])]], norm_type)
        assert found.item() == pytest.approx(value * 2 ** (1 / norm_type), rel=1e-5)
