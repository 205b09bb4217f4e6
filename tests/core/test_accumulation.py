import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_parstrat.core.accumulation import (
    AccumulationWindow,
    PartialWindow,
    gradient_scale,
    reference_weight,
    weighted_gradient_scale,
)

BOTH: list[PartialWindow] = ["exact", "lightning"]
# Between two powers of two: the float next to where rounding changes its mind.
HALFWAY = math.sqrt(2.0)

epochs = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=4)


@given(epochs=epochs, data=st.data())
def test_a_window_holds_what_lightning_has_not_zeroed_yet(epochs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Over epochs of so many batches, each with its own K, and trainings that end anywhere and are resumed."""
    window = AccumulationWindow()
    drawn: list[int] = []
    ran: set[int] = set()
    for accumulate, batches in epochs:
        for batch_idx in range(batches):
            if data.draw(st.sampled_from([False, False, False, True])):
                # Resumed here by another process: a checkpoint holds no gradients.
                window = AccumulationWindow()
                drawn, ran = [], set()
            if batch_idx % accumulate == 0:
                drawn, ran = [], set()
            assert window.begin_batch(batch_idx, accumulate) is (not drawn)
            drawn.append(batch_idx)
            # None where a training step returns None, several where a closure is evaluated again.
            for _ in range(data.draw(st.integers(0, 2))):
                window.run_backward()
                ran.add(batch_idx)
            assert window.micro_batches == len(drawn)
            assert window.backwards == len(ran)


@pytest.mark.parametrize(
    ("batches", "accumulate", "expected"),
    [
        # Each batch's index, whether it begins a window, and how many are in the window then.
        ([0, 1, 2, 3, 4], 3, [(True, 1), (False, 2), (False, 3), (True, 1), (False, 2)]),
        ([0, 0, 0], 3, [(True, 1), (True, 1), (True, 1)]),
        ([5, 6, 7, 8], 3, [(True, 1), (True, 1), (False, 2), (False, 3)]),
        ([4, 5, 6], 3, [(True, 1), (False, 2), (True, 1)]),
        ([4, 0, 1], 3, [(True, 1), (True, 1), (False, 2)]),
        ([0, 1, 0, 1], 1, [(True, 1)] * 4),
    ],
    ids=["short window", "epochs of one", "resumed at the last", "resumed inside", "resumed, then an epoch", "K is 1"],
)
def test_windows_by_hand(batches: list[int], accumulate: int, expected: list[tuple[bool, int]]) -> None:
    window = AccumulationWindow()
    assert [(window.begin_batch(index, accumulate), window.micro_batches) for index in batches] == expected


@given(epochs=epochs, ranks=st.integers(1, 4))
def test_every_step_of_a_training_is_scaled_to_the_mean_of_the_batches_it_holds(
    epochs: list[tuple[int, int]], ranks: int
) -> None:
    window = AccumulationWindow()
    for accumulate, batches in epochs:
        for batch_idx in range(batches):
            window.begin_batch(batch_idx, accumulate)
            if (batch_idx + 1) % accumulate and batch_idx + 1 < batches:
                continue
            held = batch_idx % accumulate + 1
            scale = gradient_scale(
                accumulate=accumulate, micro_batches=window.micro_batches, world_size=ranks, partial_window="exact"
            )
            # As many gradients of 1 / K.
            assert scale * ranks * held / accumulate == pytest.approx(1.0, rel=1e-14)


def random_gradients(ranks: int, micro_batches: int, seed: int) -> Tensor:
    """Of rank, micro-batch and element."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, micro_batches, 5, dtype=torch.float64, generator=generator)


sizes = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 6))
seeds = st.integers(0, 2**31)
weights = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))


@pytest.mark.parametrize("partial_window", BOTH)
@given(sizes=sizes, seed=seeds)
def test_the_scaled_sum_is_the_mean_over_ranks_and_micro_batches(
    partial_window: PartialWindow, sizes: tuple[int, int, int], seed: int
) -> None:
    ranks, micro_batches, missing = sizes
    accumulate = micro_batches + missing
    gradients = random_gradients(ranks, micro_batches, seed)
    scale = gradient_scale(
        accumulate=accumulate, micro_batches=micro_batches, world_size=ranks, partial_window=partial_window
    )
    # Stock Lightning: each micro-batch over K, whatever their number, and the mean over ranks.
    stock = gradients.sum((0, 1)) / (accumulate * ranks)
    expected = gradients.mean((0, 1)) if partial_window == "exact" else stock
    torch.testing.assert_close(scale * (gradients / accumulate).sum((0, 1)), expected)


@pytest.mark.parametrize("partial_window", BOTH)
@given(accumulate=st.integers(1, 10**6), ranks=st.integers(1, 10**5))
def test_a_full_window_is_divided_by_the_number_of_ranks_and_nothing_else(
    partial_window: PartialWindow, accumulate: int, ranks: int
) -> None:
    scale = gradient_scale(
        accumulate=accumulate, micro_batches=accumulate, world_size=ranks, partial_window=partial_window
    )
    assert scale == 1.0 / ranks


def weighted_mean(
    gradients: Tensor, weights: Tensor, reference: float, accumulate: int, partial_window: PartialWindow
) -> Tensor:
    """What is done to gradients of a window, in their dtype: scaled losses, the sum, the scale."""
    factors = weights / reference
    summed = (gradients * factors[..., None].to(gradients.dtype) / accumulate).sum((0, 1))
    return summed * weighted_gradient_scale(
        total_weight=float(weights.sum()),
        reference=reference,
        accumulate=accumulate,
        micro_batches=weights.shape[1],
        partial_window=partial_window,
    )


def draw_weights(data: st.DataObject, ranks: int, micro_batches: int) -> Tensor:
    drawn = data.draw(st.lists(weights, min_size=ranks * micro_batches, max_size=ranks * micro_batches))
    assume(any(drawn))
    return torch.tensor(drawn, dtype=torch.float64).reshape(ranks, micro_batches)


@pytest.mark.parametrize("partial_window", BOTH)
@given(sizes=sizes, seed=seeds, reference=st.sampled_from([1.0, 0.25, 4096.0]), data=st.data())
def test_the_scaled_sum_of_weighted_losses_is_their_weighted_mean(
    partial_window: PartialWindow, sizes: tuple[int, int, int], seed: int, reference: float, data: st.DataObject
) -> None:
    ranks, micro_batches, missing = sizes
    accumulate = micro_batches + missing
    gradients, given_weights = random_gradients(ranks, micro_batches, seed), draw_weights(data, ranks, micro_batches)
    share = 1.0 if partial_window == "exact" else micro_batches / accumulate
    expected = share * (gradients * given_weights[..., None]).sum((0, 1)) / given_weights.sum()
    found = weighted_mean(gradients, given_weights, reference, accumulate, partial_window)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("partial_window", BOTH)
@given(sizes=sizes, weight=st.floats(1e-6, 1e9))
def test_equal_weights_are_no_weights(
    partial_window: PartialWindow, sizes: tuple[int, int, int], weight: float
) -> None:
    ranks, micro_batches, missing = sizes
    accumulate = micro_batches + missing
    unweighted = gradient_scale(
        accumulate=accumulate, micro_batches=micro_batches, world_size=ranks, partial_window=partial_window
    )
    reference = reference_weight(weight)
    weighted = weighted_gradient_scale(
        total_weight=weight * ranks * micro_batches,
        reference=reference,
        accumulate=accumulate,
        micro_batches=micro_batches,
        partial_window=partial_window,
    )
    assert weight / reference * weighted == pytest.approx(unweighted, rel=1e-12)


@pytest.mark.parametrize("partial_window", BOTH)
@given(accumulate=st.integers(1, 9), reference=st.sampled_from([1.0, 2.0**-20, 2.0**20]), data=st.data())
def test_where_nothing_weighs_the_scale_is_zero(
    partial_window: PartialWindow, accumulate: int, reference: float, data: st.DataObject
) -> None:
    scale = weighted_gradient_scale(
        total_weight=0.0,
        reference=reference,
        accumulate=accumulate,
        micro_batches=data.draw(st.integers(1, accumulate)),
        partial_window=partial_window,
    )
    assert scale == 0.0


@pytest.mark.parametrize("partial_window", BOTH)
@given(sizes=sizes, seed=seeds, shift=st.integers(-20, 20), data=st.data())
def test_gradients_do_not_depend_on_the_reference_to_the_last_bit(
    partial_window: PartialWindow, sizes: tuple[int, int, int], seed: int, shift: int, data: st.DataObject
) -> None:
    ranks, micro_batches, missing = sizes
    gradients, given_weights = random_gradients(ranks, micro_batches, seed), draw_weights(data, ranks, micro_batches)
    own = reference_weight(float(given_weights.mean()))
    one, other = (
        weighted_mean(gradients.float(), given_weights, reference, micro_batches + missing, partial_window)
        for reference in (own, own * 2.0**shift)
    )
    assert torch.equal(one, other)


@given(mean_weight=st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
@example(mean_weight=HALFWAY)
@example(mean_weight=math.nextafter(HALFWAY, 0.0))
@example(mean_weight=1.7e308)
@example(mean_weight=5e-324)
def test_the_reference_is_the_power_of_two_next_to_the_mean(mean_weight: float) -> None:
    reference = reference_weight(mean_weight)
    assert math.frexp(reference)[0] == 0.5
    # There is no power of two above the largest float.
    at_most = math.sqrt(2) if mean_weight < 2.0**1023 else 2.0
    assert max(mean_weight / reference, reference / mean_weight) <= at_most * (1 + 1e-15)


@given(mean_weight=st.floats(1e-30, 1e30))
@example(mean_weight=HALFWAY)
@example(mean_weight=HALFWAY * 2.0**-17)
@example(mean_weight=math.nextafter(HALFWAY, 0.0) * 2.0**-17)
def test_the_reference_follows_weights_in_another_unit_exactly(mean_weight: float) -> None:
    assert reference_weight(65536 * mean_weight) == 65536 * reference_weight(mean_weight)
