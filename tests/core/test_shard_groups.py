from typing import Any

import pytest

from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology


def test_groups_are_those_of_nodes_or_of_consecutive_ranks() -> None:
    chosen: list[tuple[Any, str, list[tuple[int, ...]]]] = [
        ("all", "aabb", [(0, 1, 2, 3)]),
        ("node", "abab", [(0, 2), (1, 3)]),
        (2, "abab", [(0, 1), (2, 3)]),
        (1, "aab", [(0,), (1,), (2,)]),
    ]
    for choice, keys, groups in chosen:
        assert list(map(tuple, ShardGroups.chosen(choice, Topology.of(keys)).groups)) == groups


def test_the_same_groups_are_equal_by_whatever_they_were_chosen() -> None:
    for keys, choices in (("aabb", ("node", 2)), ("aabb", ("all", 4)), ("aaa", ("all", "node", 3))):
        assert len({ShardGroups.chosen(choice, Topology.of(keys)) for choice in choices}) == 1, keys


def test_groups_of_unequal_size_are_refused_with_what_is_allowed() -> None:
    refused: list[tuple[Any, str, str]] = [
        (
            "node",
            "aab",
            "'node' does not divide the 3 ranks .* equal groups. Nodes have 2, 1 ranks. Choose one of 1, 3",
        ),
        (4, "aaabbb", "shard_group=4 does not divide the 6 ranks.*Choose one of 1, 2, 3, 6 "),
        (8, "aabb", "shard_group=8 does not divide the 4 ranks"),
    ]
    for choice, keys, message in refused:
        with pytest.raises(ValueError, match=message):
            ShardGroups.chosen(choice, Topology.of(keys))


def test_rings_carry_more_where_a_group_is_on_several_nodes_of_several_ranks() -> None:
    # Nodes of a group, and from how many ranks on each of them it is so: docs/how_zero1_works.md has these.
    for nodes, least in ((1, None), (2, 5), (3, 4), (4, 3), (5, 3), (40, 3)):
        for on_node in range(1, 9):
            topology = Topology(tuple(rank // on_node for rank in range(2 * nodes * on_node)))
            groups = ShardGroups.chosen(nodes * on_node, topology)
            assert groups.rings_carry_more(topology) is (least is not None and on_node >= least), (nodes, on_node)
            assert groups.rings_carry_more(None) is False
