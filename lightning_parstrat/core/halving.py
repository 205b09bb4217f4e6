"""In which rounds ranks exchange chunks where a message for every pair of ranks would be too many.

Recursive halving and doubling (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, sections 4.1 and 4.4), in groups of up to eight ranks instead of pairs. Each chunk that a rank does not
own leaves it once, as by pairs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_parstrat.core.topology import Topology

MOST_BY_PAIRS = 32
"""Up to so many ranks, each sends every other one a message, which takes one latency and no partial sums.

Real ranks over Gloo: of processor time in a step, rounds take a quarter less than pairs at 64 ranks, as much at 32, and
more at 8.
"""

LARGEST_ROUND = 8
"""So many ranks exchange in one round, where their number allows it: few rounds, each of which wakes a thread."""


class HalvingRound(NamedTuple):
    """One round, as one rank sees it. Chunks are numbered by their place in :attr:`HalvingPlan.order`.

    Attributes:
        ranks: Those that exchange, in the order in which they sum; this one among them.
        place: This rank's among them.
        cuts: The chunks ``[cuts[k], cuts[k + 1])`` are those whose sums rank ``ranks[k]`` goes on with.
        sends_sums: Whether what is sent has been summed in an earlier round, in the dtype of the shard. What a node has
            summed up goes to other nodes in the dtype of the gradients, as does what a rank sends first.
    """

    ranks: tuple[int, ...]
    place: int
    cuts: range
    sends_sums: bool

    @property
    def own(self) -> tuple[int, int]:
        """First chunk that this rank goes on with, and the first after them."""
        return self.cuts[self.place], self.cuts[self.place + 1]


class HalvingPlan(NamedTuple):
    """The rounds of a reduce-scatter; an all-gather goes through them backward.

    Attributes:
        order: The rank that owns each chunk, so ordered that what goes to one rank lies together. A range where that
            is the order of the ranks.
        rounds: In their order.
    """

    order: Sequence[int]
    rounds: tuple[HalvingRound, ...]


def exchanges_in_rounds(world_size: int) -> bool:
    """Whether so many CPU ranks exchange chunks in rounds, not by pairs."""
    return world_size > MOST_BY_PAIRS


def halving_plan(rank: int, topology: Topology) -> HalvingPlan:
    """The rounds of one rank: first within its node, then between nodes, if there are several with as many ranks each.

    A rank sends ``sum(size - 1)`` messages for each phase of a bucket, over the rounds: 14 of 64 ranks, 21 of 512, 22
    of 1,024. A number of ranks with a large prime factor has a round of that size.

    Args:
        rank: The rank.
        topology: Which ranks share a node.
    """
    order, sizes, within = _by_pairs_or_rounds(topology)
    own, first, past = order.index(rank), 0, topology.world_size
    rounds = []
    for number, size in enumerate(sizes):
        stride = (past - first) // size
        place, offset = divmod(own - first, stride)
        ranks = tuple(order[first + offset + step * stride] for step in range(size))
        rounds.append(HalvingRound(ranks, place, range(first, past + 1, stride), number not in (0, within)))
        first += place * stride
        past = first + stride
    return HalvingPlan(order, tuple(rounds))


def _by_pairs_or_rounds(topology: Topology) -> tuple[Sequence[int], list[int], int]:
    """The order of chunks, the sizes of rounds, and the number of the first between nodes (0: there is none)."""
    ranks = topology.world_size
    sizes_of = round_sizes if exchanges_in_rounds(ranks) else _one_round
    if not topology.has_two_levels:
        return range(ranks), sizes_of(ranks), 0
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.nodes):
        nodes.setdefault(node, []).append(rank)
    # By the place in the node: within nodes, ranks divide up places.
    order = [rank for counterparts in zip(*nodes.values(), strict=True) for rank in counterparts]
    within = sizes_of(ranks // len(nodes))
    return order, within + sizes_of(len(nodes)), len(within)


def _one_round(ranks: int) -> list[int]:
    return [ranks]


def round_sizes(ranks: int) -> list[int]:
    """Sizes of rounds, whose product is the number of ranks.

    The largest comes first: then most of the bytes are sent before they have been summed.
    """
    return sorted(_factors(ranks), reverse=True)


def _factors(ranks: int) -> Iterator[int]:
    """The largest of a round's sizes as often as they go, then primes."""
    for factor in (*range(LARGEST_ROUND, 1, -1), *range(LARGEST_ROUND + 1, ranks + 1)):
        while ranks % factor == 0:
            ranks //= factor
            yield factor
        if ranks == 1:
            return
