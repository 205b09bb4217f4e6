import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_parstrat.core.norms import accumulation_dtype, clip_coefficient, partial_norm, total_norm
from lightning_parstrat.distributed.gradients.clipping import norms_of

CPU = torch.device("cpu")
NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
# Of a norm against torch's, which rounds bfloat16 to 8 bits for every tensor's own norm.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.complex64: 1e-5}


def partial(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """What a rank contributes that owns ``tensors``."""
    return partial_norm(norms_of(tensors, norm_type, dtype), norm_type, CPU)


def norm_over(ranks: list[list[Tensor]], norm_type: float) -> Tensor:
    """What the ranks together find, each knowing its own gradients only."""
    dtype = accumulation_dtype(tensor.dtype for tensors in ranks for tensor in tensors)
    partials = torch.stack([partial(tensors, norm_type, dtype) for tensors in ranks])
    return total_norm(partials.amax(0) if math.isinf(norm_type) else partials.sum(0), norm_type, dtype)


def random_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


shapes = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6)


@given(
    norm_type=st.sampled_from(NORM_TYPES),
    dtype=st.sampled_from(list(TOLERANCE)),
    shapes=shapes,
    ranks=st.integers(1, 5),
    data=st.data(),
)
def test_partial_norms_of_a_split_combine_to_the_norm_of_the_whole(
    norm_type: float, dtype: torch.dtype, shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    tensors = random_tensors(shapes, dtype, data.draw(st.integers(0, 2**31)))
    shards: list[list[Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        flat = tensor.reshape(-1)
        cut = data.draw(st.integers(0, flat.numel()))
        for piece in (flat[:cut], flat[cut:]):
            shards[data.draw(st.integers(0, ranks - 1))].append(piece)
    # torch's maximum norm refuses tensors without elements.
    reference = torch.nn.utils.get_total_norm([tensor for tensor in tensors if tensor.numel()], norm_type)
    torch.testing.assert_close(
        norm_over(shards, norm_type).double(), reference.double(), rtol=TOLERANCE[dtype], atol=1e-7
    )


def test_gradients_of_several_dtypes_are_one_whole() -> None:
    tensors = [random_tensors([(5, 3)], dtype, seed)[0] for seed, dtype in enumerate(TOLERANCE)]
    whole = torch.cat([tensor.to(torch.complex128).reshape(-1) for tensor in tensors])
    for norm_type in NORM_TYPES:
        found = norm_over([tensors[:1], tensors[1:]], norm_type)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, torch.linalg.vector_norm(whole, norm_type), rtol=1e-6, atol=0)


def test_a_rank_that_owns_nothing_contributes_zero() -> None:
    nothing: list[list[Tensor]] = [[], [torch.empty(0)], [torch.empty(3, 0), torch.empty(0)]]
    for gradients, dtype, norm_type in product(nothing, (torch.float32, torch.float64), NORM_TYPES):
        contribution = partial(gradients, norm_type, dtype)
        assert contribution.tolist() == ([0.0, 0.0] if math.isinf(norm_type) else [0.0])
        assert total_norm(contribution, norm_type, dtype).dtype == dtype


def test_a_maximum_over_ranks_that_passes_over_nan_still_finds_it() -> None:
    bad = partial([torch.tensor([1.0, math.nan])], math.inf, torch.float32)
    good = partial([torch.tensor([2.0])], math.inf, torch.float32)
    # What a reduction by comparisons makes of both, in either order.
    for combined in (torch.where(bad > good, bad, good), torch.where(good > bad, good, bad)):
        assert math.isnan(total_norm(combined, math.inf, torch.float32))


def test_a_norm_type_that_is_not_positive_is_refused() -> None:
    for norm_type in (0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"norm_type: {norm_type}\. Must be > 0, or inf"):
            partial_norm([torch.ones(())], norm_type, CPU)


def clips_as_torch(tensors: list[Tensor], shards: list[list[Tensor]], norm_type: float, max_norm: float) -> Tensor:
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    found = norm_over(shards, norm_type)
    torch.testing.assert_close(found, norm, rtol=1e-5, atol=0, equal_nan=True)
    coefficient = clip_coefficient(found, max_norm)
    for parameter, tensor in zip(parameters, tensors, strict=True):
        torch.testing.assert_close(tensor * coefficient, parameter.grad, rtol=1e-5, atol=0, equal_nan=True)
    return found


def test_clipping_shards_equals_torchs_clipping_of_the_whole() -> None:
    for norm_type, max_norm, scale in product(NORM_TYPES, (0.0, 1e-3, 1.0, 1e4), (0.0, 1e-8, 1.0, 1e5)):
        tensors = [scale * tensor for tensor in random_tensors([(7, 5), (3,), ()], torch.float32, 0)]
        clips_as_torch(tensors, [tensors[:1], tensors[1:], []], norm_type, max_norm)


def test_a_nonfinite_element_on_one_rank_shows_in_norm_and_coefficient_as_torchs() -> None:
    for norm_type, value in product(NORM_TYPES, (math.inf, -math.inf, math.nan)):
        tensors = [torch.ones(4), torch.tensor([1.0, value, 2.0])]
        assert not clips_as_torch(tensors, [tensors[:1], tensors[1:], []], norm_type, 1.0).isfinite()


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


def test_accumulation_dtype() -> None:
    single, double = torch.float32, torch.float64
    assert accumulation_dtype(()) == accumulation_dtype((single,)) == accumulation_dtype((torch.complex64,)) == single
    assert accumulation_dtype((torch.bfloat16, torch.float16)) == single
    assert accumulation_dtype((torch.bfloat16, double)) == accumulation_dtype((torch.complex128, single)) == double


def test_the_coefficient_never_enlarges_and_is_the_ratio_beyond_the_limit() -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e6], dtype=torch.float64)
    coefficients = clip_coefficient(norms, 1.0)
    assert coefficients.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5, 1e-6], rel=1e-5)
    assert coefficients.max() <= 1.0
