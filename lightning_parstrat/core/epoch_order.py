"""What is left of an epoch that some ranks have begun, and how others share it."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

_NOTHING = object()


def left_of_turns(order: Sequence[Any], taken: Sequence[int]) -> list[Any]:
    """What nobody has taken of an order in which ranks take turns: of N, rank r takes items r, r + N, r + 2N.

    Args:
        order: All items, without padding.
        taken: How many items each rank has taken.
    """
    ranks, everybody = len(taken), min(taken)
    # What all have taken is in front; only behind it have some taken more than others.
    begin = everybody * ranks
    return [item for place, item in enumerate(order[begin:], begin) if place // ranks >= taken[place % ranks]]


def in_turns(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Puts together what ranks would have taken in turns: the inverse of :func:`share`, but for padding."""
    rounds = zip_longest(*parts, fillvalue=_NOTHING)
    return [item for one_of_each in rounds for item in one_of_each if item is not _NOTHING]


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
