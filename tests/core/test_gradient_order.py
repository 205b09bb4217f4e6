import pytest

from lightning_parstrat.core.gradient_order import share_waited


def one_by_one(positions: list[int]) -> list[list[tuple[int, int]]]:
    """A bucket of 10 bytes for each gradient, given when it is made."""
    return [[(position, 10)] for position in positions]


def test_gradients_wait_for_those_that_leave_before_them() -> None:
    number = 20
    in_order, last_first = list(range(number)), [number - 1, *range(number - 1)]
    assert share_waited(one_by_one(in_order)) <= 0.0
    # Buckets fill in their time, however they are cut.
    assert share_waited([[(0, 10), (1, 30)], [(2, 5)], [(3, 10), (4, 1)]]) <= 0.0
    # Nothing leaves before the end: half of a backward, on average.
    assert share_waited(one_by_one(last_first)) == pytest.approx(0.475, abs=0.03)
    assert share_waited(one_by_one(in_order[::-1])) == pytest.approx(0.475, abs=0.03)
    # Two neighbours that change places are no loss.
    assert share_waited(one_by_one([1, 0, *range(2, number)])) < 0.01
    assert share_waited([]) == 0.0
