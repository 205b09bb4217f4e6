"""What is left of an epoch that some ranks have begun, and how others share it."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

_NOTHING = object()


def left_of_turns(parts: Sequence[Sequence[Any]], taken: Sequence[int], whole: int | None = None) -> list[Any]:
    """What nobody has taken of an order in which ranks take turns: of N, rank r takes items r, r + N, r + 2N.

    Args:
        parts: The items of each rank.
        taken: How many of them each rank has taken.
        whole: How many there are together, without padding; None if that is unknown.
    """
    rounds = enumerate(zip_longest(*parts, fillvalue=_NOTHING))
    return [
        item
        for turn, items in rounds
        for rank, item in enumerate(items)
        if turn >= taken[rank] and item is not _NOTHING and (whole is None or turn * len(parts) + rank < whole)
    ]


def share(order: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """A rank's items, equally many on every rank: the first ones come once more where the ranks do not divide them.

    Args:
        order: All items.
        rank: Which rank's.
        ranks: Number of ranks.
    """
    each = -(-len(order) // ranks)
    # As often as it takes: a hundred ranks may share three items.
    return [order[place % len(order)] for place in range(rank, each * ranks, ranks)]
