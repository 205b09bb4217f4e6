"""What ranks leave of an order is what nobody has taken, and others share all of it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.epoch_order import left_of_turns, share


@given(st.integers(0, 40), st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 6))
def test_what_ranks_have_left_others_share(length: int, taken: list[int], ranks: int) -> None:
    order = list(range(length))
    parts = [share(order, rank, len(taken)) for rank in range(len(taken))]
    assert len({len(part) for part in parts}) == 1
    left = left_of_turns(parts, taken, length)
    had = {item for rank, number in enumerate(taken) for item in order[rank :: len(taken)][:number]}
    assert left == [item for item in order if item not in had]
    counts = Counter(item for rank in range(ranks) for item in share(left, rank, ranks))
    assert counts.keys() == set(left)
    assert counts.total() - len(left) < ranks
    # Of an unknown length nothing is left out.
    assert Counter(left_of_turns(parts, [0] * len(parts))).total() == sum(map(len, parts))
