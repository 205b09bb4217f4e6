"""Who exchanges with whom, round by round, so that all ranks come to know what each of them has said."""

from typing import NamedTuple

_GROUP_SIZES = (4, 3, 2)
"""Of 4 rather than twice of 2: the same three messages less one, in one latency instead of two."""


class Rounds(NamedTuple):
    """What one rank does; everything is done in the order of the attributes.

    Attributes:
        rank: This one.
        left_to: Who speaks for this rank, which takes part in no round; None for most ranks.
        speaks_for: A rank that is spoken for by this one; None for most ranks.
        groups: Of each round the ranks that tell each other all that they have heard so far, this one among them.
    """

    rank: int
    left_to: int | None
    speaks_for: int | None
    groups: tuple[tuple[int, ...], ...]

    @property
    def is_one_exchange(self) -> bool:
        """Whether what this rank receives does not have to be sent on."""
        return len(self.groups) <= 1 and self.speaks_for is None

    @property
    def messages(self) -> int:
        """How many this rank sends, and receives."""
        return sum(len(group) - 1 for group in self.groups) + (self.left_to is not None) + (self.speaks_for is not None)


def exchange_rounds(rank: int, world_size: int) -> Rounds:
    """Recursive doubling, in groups of up to four ranks instead of pairs.

    The largest number of ranks that is a product of 2s and 3s takes part in the rounds, at least three quarters of
    them. What is left is spoken for: each of those ranks tells its message to one that takes part, and is told what
    came of it, which takes two latencies more than the rounds.

    A rank sends at most ``2 * log2(world_size)`` messages, in at most ``log2(world_size) / 2 + 4`` latencies: 1 message
    at 2 ranks, 3 at 4, 9 at 64, 13 at 512, 15 at 1,024.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section
    4.5, recursive doubling, and what it does where the number of ranks is no power of two.

    Args:
        rank: The rank.
        world_size: Number of ranks.
    """
    sizes = _factors(world_size)
    taking_part = 1
    for size in sizes:
        taking_part *= size
    if rank >= taking_part:
        return Rounds(rank, rank - taking_part, None, ())
    groups, stride = [], 1
    for size in sizes:
        first = rank - rank // stride % size * stride
        groups.append(tuple(range(first, first + size * stride, stride)))
        stride *= size
    counterpart = rank + taking_part
    return Rounds(rank, None, counterpart if counterpart < world_size else None, tuple(groups))


def _factors(world_size: int) -> list[int]:
    """Group sizes whose product is the largest that is no more than ``world_size``."""
    for product in range(world_size, 0, -1):
        sizes, left = [], product
        for size in _GROUP_SIZES:
            while left % size == 0:
                left //= size
                sizes.append(size)
        if left == 1:
            return sizes
    raise AssertionError(f"{world_size} is no number of ranks")
