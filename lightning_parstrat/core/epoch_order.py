"""The rest of an epoch that some ranks have begun, and how others share it."""

from collections.abc import Sequence
from typing import Any


def left_of_turns(parts: Sequence[Sequence[Any]], taken: Sequence[int], whole: int | None = None) -> list[Any]:
    """The items that no rank has taken, in an order in which ranks take turns. Of N, rank r takes r, r + N, r + 2N.

    Args:
        parts: The items of each rank.
        taken: How many of these items each rank has taken.
        whole: How many items there are together, without padding. If that is unknown, None.
    """
    ranks, turns = len(parts), max(map(len, parts))
    return [
        parts[rank][turn]
        for turn in range(turns)
        for rank in range(ranks)
        if taken[rank] <= turn < len(parts[rank]) and (whole is None or turn * ranks + rank < whole)
    ]


def share(order: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """A rank's items, equally many on every rank. If the ranks do not divide the items, the first ones are repeated.

    Args:
        order: All items.
        rank: Which rank's.
        ranks: Number of ranks.
    """
    each = -(-len(order) // ranks)
    # Items are repeated as often as needed: a hundred ranks may share three items.
    return [order[place % len(order)] for place in range(rank, each * ranks, ranks)]
