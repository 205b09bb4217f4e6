import math

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_parstrat.core.accumulation import AccumulationWindow, reference_weight

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
