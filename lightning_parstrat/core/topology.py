"""The ranks that share a node. The network between nodes is slow, the transfers within a node are not."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """The node of every rank.

    Attributes:
        nodes: For each rank the number of its node. Nodes are numbered in the order of their first ranks.
    """

    nodes: tuple[int, ...]

    @classmethod
    def of(cls, keys: Sequence[Hashable]) -> "Topology":
        """From anything that is equal for ranks of one node and for no others, such as a host name."""
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(key, len(numbers)) for key in keys))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several nodes with equally many ranks, more than one."""
        # Nodes of unequal size would leave ranks without a counterpart.
        counts = {self.nodes.count(node) for node in set(self.nodes)}
        return len(set(self.nodes)) > 1 and len(counts) == 1 and counts != {1}

    def node_mates(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of ``rank``, ``rank`` among them, in order."""
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same place within their nodes as ``rank``, by node, ``rank`` among them.

        All nodes must have equally many ranks.
        """
        place = self.node_mates(rank).index(rank)
        first_of_nodes = dict.fromkeys(self.nodes)
        return tuple([r for r, its_node in enumerate(self.nodes) if its_node == node][place] for node in first_of_nodes)
