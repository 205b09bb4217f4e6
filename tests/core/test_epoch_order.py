"""What ranks leave of an order is what nobody has taken, and others share all of it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.epoch_order import in_turns, left_of_turns, share

LENGTHS = st.integers(0, 40)
TAKEN = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@given(LENGTHS, TAKEN)
def test_what_is_left_and_what_was_taken_are_the_order(length: int, taken: list[int]) -> None:
    order = list(range(length))
    had = [item for rank, number in enumerate(taken) for item in order[rank :: len(taken)][:number]]
    left = left_of_turns(order, taken)
    assert sorted(had + left) == order
    assert left == sorted(left)


@given(LENGTHS, st.integers(1, 6))
def test_a_share_is_as_large_on_every_rank_and_nothing_is_missing(length: int, ranks: int) -> None:
    order = list(range(length))
    parts = [share(order, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    counts = Counter(item for part in parts for item in part)
    assert counts.keys() == set(order)
    assert counts.total() - length < ranks
    assert in_turns(parts)[:length] == order


def test_parts_of_different_lengths_are_put_together() -> None:
    assert in_turns([[0, 3, 5], [1], [2, 4]]) == [0, 1, 2, 3, 4, 5]
