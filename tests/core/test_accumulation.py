import math

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_parstrat.core.accumulation import (
    AccumulationWindow,
    PartialWindow,
    gradient_scale,
    reference_weight,
)

partial_windows: st.SearchStrategy[PartialWindow] = st.sampled_from(["exact", "lightning"])
# Between two powers of two: the float next to where rounding changes its mind.
HALFWAY = math.sqrt(2.0)

epochs = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=4)


@given(epochs=epochs, data=st.data())
def test_a_window_holds_what_lightning_has_not_zeroed_yet(epochs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Over epochs of so many batches, each with its own K, and trainings that end anywhere and are resumed."""
    window = AccumulationWindow()
    drawn: list[int] = []
    for accumulate, batches in epochs:
        for batch_idx in range(batches):
            if data.draw(st.sampled_from([False, False, False, True])):
                # Resumed here by another process: a checkpoint holds no gradients.
                window = AccumulationWindow()
                drawn = []
            if batch_idx % accumulate == 0:
                drawn = []
            assert window.begin_batch(batch_idx, accumulate) is (not drawn)
            drawn.append(batch_idx)
            assert window.micro_batches == len(drawn)


def random_gradients(ranks: int, micro_batches: int, seed: int) -> Tensor:
    """Of rank, micro-batch and element."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, micro_batches, 5, dtype=torch.float64, generator=generator)


sizes = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 6))
seeds = st.integers(0, 2**31)


@given(partial_window=partial_windows, sizes=sizes, seed=seeds)
def test_the_scaled_sum_is_the_mean_over_ranks_and_micro_batches(
    partial_window: PartialWindow, sizes: tuple[int, int, int], seed: int
) -> None:
    ranks, micro_batches, missing = sizes
    accumulate = micro_batches + missing
    gradients = random_gradients(ranks, micro_batches, seed)
    scale = gradient_scale(
        accumulate=accumulate, micro_batches=micro_batches, total=ranks * micro_batches, partial_window=partial_window
    )
    # Stock Lightning: each micro-batch over K, whatever their number, and the mean over ranks.
    stock = gradients.sum((0, 1)) / (accumulate * ranks)
    expected = gradients.mean((0, 1)) if partial_window == "exact" else stock
    torch.testing.assert_close(scale * (gradients / accumulate).sum((0, 1)), expected)
    # A full window is divided by the number of ranks and nothing else.
    assert scale == 1.0 / ranks or (missing and partial_window == "exact")


def weighted_mean(
    gradients: Tensor, weights: Tensor, reference: float, accumulate: int, partial_window: PartialWindow
) -> Tensor:
    """What is done to gradients of a window, in their dtype: scaled losses, the sum, the scale."""
    factors = weights / reference
    summed = (gradients * factors[..., None].to(gradients.dtype) / accumulate).sum((0, 1))
    return summed * gradient_scale(
        accumulate=accumulate,
        micro_batches=weights.shape[1],
        total=float(weights.sum()) / reference,
        partial_window=partial_window,
    )


@given(partial_window=partial_windows, sizes=sizes, seed=seeds, shift=st.integers(-20, 20), data=st.data())
def test_the_scaled_sum_of_weighted_losses_is_their_weighted_mean(
    partial_window: PartialWindow, sizes: tuple[int, int, int], seed: int, shift: int, data: st.DataObject
) -> None:
    ranks, micro_batches, missing = sizes
    accumulate = micro_batches + missing
    gradients, numel = random_gradients(ranks, micro_batches, seed), ranks * micro_batches
    drawn = data.draw(st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), min_size=numel, max_size=numel))
    assume(any(drawn))
    weights = torch.tensor(drawn, dtype=torch.float64).reshape(ranks, micro_batches)
    share = 1.0 if partial_window == "exact" else micro_batches / accumulate
    expected = share * (gradients * weights[..., None]).sum((0, 1)) / weights.sum()
    own = reference_weight(float(weights.mean()))
    found = weighted_mean(gradients, weights, own, accumulate, partial_window)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    # They do not depend on the reference, to the last bit.
    one, other = (
        weighted_mean(gradients.float(), weights, reference, accumulate, partial_window)
        for reference in (own, own * 2.0**shift)
    )
    assert torch.equal(one, other)
    # Where nothing weighs there is no step.
    nothing = weighted_mean(gradients, torch.zeros_like(weights), own, accumulate, partial_window)
    assert not nothing.any()


@given(mean_weight=st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
@example(mean_weight=HALFWAY)
@example(mean_weight=math.nextafter(HALFWAY, 0.0))
@example(mean_weight=HALFWAY * 2.0**-17)
@example(mean_weight=1.7e308)
@example(mean_weight=5e-324)
def test_the_reference_is_the_power_of_two_next_to_the_mean(mean_weight: float) -> None:
    reference = reference_weight(mean_weight)
    assert math.frexp(reference)[0] == 0.5
    # There is no power of two above the largest float.
    at_most = math.sqrt(2) if mean_weight < 2.0**1023 else 2.0
    assert max(mean_weight / reference, reference / mean_weight) <= at_most * (1 + 1e-15)
    # It follows weights in another unit exactly.
    if 1e-300 < mean_weight < 1e300:
        assert reference_weight(65536 * mean_weight) == 65536 * reference
