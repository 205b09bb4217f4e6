from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.global_batch import Cost, Division, cost_of, cut, fastest_cut, time_of_equal_shares

shares = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@given(number=st.integers(0, 5000), shares=shares)
def test_parts_are_in_proportion_and_none_is_empty(number: int, shares: list[float]) -> None:
    parts = cut(number, shares)
    assert sum(parts) == number and len(parts) == len(shares)
    assert number < len(shares) or min(parts) > 0
    quotas = [number * Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    # Each of the small ones may get its sample from the same large one.
    given_away = sum(quota < 1 for quota in quotas)
    for part, quota in zip(parts, quotas, strict=True):
        assert quota - 1 - given_away <= part <= max(1, quota + 1)


def test_the_rest_goes_to_the_largest_remainders() -> None:
    for number, given_shares, expected in (
        (16, [3, 1], [12, 4]),
        (10, [1, 1, 1], [4, 3, 3]),
        (7, [3, 2, 2], [3, 2, 2]),
        (1, [1, 3], [0, 1]),
        (4, [97, 1, 1, 1], [1, 1, 1, 1]),
        (0, [1, 2], [0, 0]),
    ):
        assert cut(number, given_shares) == expected


@given(
    costs=st.lists(st.builds(Cost, st.floats(0.001, 1), st.floats(0, 1)), min_size=2, max_size=3),
    more=st.integers(0, 12),
    most=st.integers(4, 12),
)
def test_no_other_cut_is_faster(costs: list[Cost], more: int, most: int) -> None:
    number = min(len(costs) + more, most * len(costs))
    parts = fastest_cut(number, costs, most)
    assert sum(parts) == number and min(parts) >= 1 and max(parts) <= most
    slowest = max(cost.of(part) for part, cost in zip(parts, costs, strict=True))
    for first in range(1, most + 1):
        for second in range(1, most + 1):
            rest = number - first - second
            other = [first, second, rest] if len(costs) == 3 else [first, second]
            if sum(other) == number and min(other) >= 1 and max(other) <= most:
                assert slowest <= max(cost.of(part) for part, cost in zip(other, costs, strict=True))
    assert sum(parts) % len(parts) or time_of_equal_shares(parts, costs) >= 1


def test_a_fixed_cost_is_found_by_two_sizes() -> None:
    # A first outlier does not count.
    found = cost_of([(8, 9.0), (8, 5.0), (8, 5.0), (2, 2.0), (2, 2.0), (2, 2.0)])
    assert found == pytest.approx(Cost(0.5, 1.0))
    assert cost_of([(8, 4.0)]) == Cost(0.5)
    # More samples were faster, or smaller ones took less than none: noise.
    assert cost_of([(8, 4.0), (2, 5.0)]) == Cost(0.5)
    assert cost_of([(8, 8.0), (2, 1.0)]) == Cost(1.0)


@given(
    step=st.integers(1, 60),
    unit=st.integers(1, 30),
    micro_batches=st.integers(1, 9),
    samples=st.integers(0, 400),
    drop_last=st.booleans(),
)
def test_steps_are_the_same_by_any_number_of_micro_batches(
    step: int, unit: int, micro_batches: int, samples: int, drop_last: bool
) -> None:
    micro_batches = min(micro_batches, step)
    sizes = list(Division(step, micro_batches, unit, drop_last, 0, []).sizes(samples))
    assert sum(sizes) == samples - samples % unit * drop_last and all(size > 0 for size in sizes)
    steps = [sum(sizes[begin : begin + micro_batches]) for begin in range(0, len(sizes), micro_batches)]
    assert all(size == step for size in steps[:-1])
