"""Groups of ranks that together hold one copy of the optimizer state: sharded within a group, the same in each.

Reduce-scatters and all-gathers then use rings of a group's ranks. The latency of a ring grows with its ranks. Between
groups, a shard is all-reduced, by a tree. The price is memory: with G ranks in a group, each rank holds 1/G of the
state, not 1/N.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_parstrat.core.topology import Topology

ShardGroupChoice = Literal["all", "node"] | int
"""``"all"`` is one group. ``"node"`` groups the ranks of each node. A number groups so many consecutive ranks."""


class ShardPlace(NamedTuple):
    """The part of a state that one rank holds, if groups of ranks hold a copy each.

    Attributes:
        shard: The number of its shard within its group.
        copy: The number of its group's copy.
        copies: How many copies there are.
    """

    shard: int
    copy: int = 0
    copies: int = 1


class ShardGroups(NamedTuple):
    """The groups of all ranks. Every rank is in one group, and all groups have equally many ranks.

    Attributes:
        groups: The ranks of each group, in the order of their shards. Rank 0 is in the first.
    """

    groups: tuple[Sequence[int], ...]

    @classmethod
    def of_all(cls, world_size: int) -> "ShardGroups":
        """One group of all ranks, which costs nothing to keep."""
        return cls((range(world_size),))

    @classmethod
    def chosen(cls, choice: ShardGroupChoice, topology: Topology) -> "ShardGroups":
        """The groups that follow from a choice on these ranks.

        Args:
            choice: See :data:`ShardGroupChoice`.
            topology: Which ranks share a node.

        Raises:
            ValueError: The ranks cannot be divided into equal groups. The message contains what you can choose.
        """
        ranks = topology.world_size
        if choice == "all":
            return cls.of_all(ranks)
        if choice == "node":
            groups = [topology.node_mates(topology.nodes.index(node)) for node in dict.fromkeys(topology.nodes)]
        else:
            groups = [tuple(range(first, first + choice)) for first in range(0, ranks, choice)]
        sizes = [len(group) for group in groups]
        if len(set(sizes)) > 1 or sum(sizes) > ranks:
            divisors = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            counts = f" Nodes have {', '.join(map(str, sizes))} ranks." if choice == "node" else ""
            raise ValueError(
                f"shard_group={choice!r} does not divide the {ranks} ranks of this training into equal groups.{counts}"
                f" Choose one of {divisors} (consecutive ranks), 'node' for equal nodes, or 'all'. Or start another"
                " number of ranks."
            )
        # However they were chosen, the same groups are equal.
        return cls(tuple(groups)) if len(groups) > 1 else cls.of_all(ranks)

    @property
    def size(self) -> int:
        """Number of ranks in a group, and of shards."""
        return len(self.groups[0])

    @property
    def copies(self) -> int:
        """Number of groups, each of which holds a copy."""
        return len(self.groups)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.size * self.copies

    def rings_carry_more(self, topology: Topology | None) -> bool:
        """Whether a ring within a group sends twice the bytes in less time than an all-to-all takes.

        Let each of several nodes have R ranks. An all-to-all sends (1 - R / G) of a bucket over a rank's own network
        interface. A ring sends twice the bytes, over the interfaces of R ranks together.

        Args:
            topology: Which ranks share a node. None means that all do.
        """
        if topology is None:
            return False
        on_node = max(Counter(topology.nodes[rank] for rank in self.groups[0]).values())
        # 1 - R / G > 2 / R in whole numbers, as both sides may be equal.
        return on_node * (self.size - on_node) > 2 * self.size

    def place(self, rank: int) -> ShardPlace:
        """The part that ``rank`` holds."""
        copy = next(number for number, group in enumerate(self.groups) if rank in group)
        return ShardPlace(self.groups[copy].index(rank), copy, self.copies)

    def mates(self, rank: int) -> Sequence[int]:
        """The ranks of the group of ``rank``, ``rank`` among them, in the order of their shards."""
        return self.groups[self.place(rank).copy]

    def holders(self, rank: int) -> Sequence[int]:
        """The ranks that hold the same shard as ``rank``, ``rank`` among them, in the order of their groups."""
        shard = self.place(rank).shard
        return tuple(group[shard] for group in self.groups)


def piece_bounds(numel: int, count: int) -> list[int]:
    """The bounds of so many pieces of about the same length. Some pieces may be empty."""
    return [numel * number // count for number in range(count + 1)]
