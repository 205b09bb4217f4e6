from itertools import pairwise
from typing import Any

import pytest

from lightning_parstrat.core.shard_groups import ShardGroups, ShardPlace, piece_bounds
from lightning_parstrat.core.topology import Topology

CHOSEN: list[tuple[Any, str, list[tuple[int, ...]]]] = [
    ("all", "aabb", [(0, 1, 2, 3)]),
    ("node", "aabb", [(0, 1), (2, 3)]),
    ("node", "abab", [(0, 2), (1, 3)]),
    ("node", "abba", [(0, 3), (1, 2)]),
    ("node", "abc", [(0,), (1,), (2,)]),
    ("node", "aaa", [(0, 1, 2)]),
    (2, "abab", [(0, 1), (2, 3)]),
    (2, "aaaaaa", [(0, 1), (2, 3), (4, 5)]),
    (3, "aabbcc", [(0, 1, 2), (3, 4, 5)]),
    (1, "aab", [(0,), (1,), (2,)]),
    (3, "aab", [(0, 1, 2)]),
    (1, "a", [(0,)]),
]


def test_every_rank_holds_one_shard_of_one_copy() -> None:
    for choice, keys, groups in CHOSEN:
        chosen = ShardGroups.chosen(choice, Topology.of(keys))
        assert [tuple(group) for group in chosen.groups] == groups
        assert (chosen.size, chosen.copies, chosen.world_size) == (len(groups[0]), len(groups), len(keys))
        for copy, group in enumerate(groups):
            for shard, rank in enumerate(group):
                assert chosen.place(rank) == ShardPlace(shard, copy, len(groups))
                assert tuple(chosen.mates(rank)) == group
                assert tuple(chosen.holders(rank)) == tuple(other[shard] for other in groups)


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


def test_pieces_cover_everything_and_differ_by_one_at_most() -> None:
    for numel, count in ((0, 3), (1, 3), (10, 3), (12, 4), (5, 1)):
        bounds = piece_bounds(numel, count)
        lengths = {stop - start for start, stop in pairwise(bounds)}
        assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, count + 1)
        assert max(lengths) - min(lengths) <= 1


def test_rings_carry_more_where_a_group_is_on_several_nodes_of_several_ranks() -> None:
    # Nodes of a group, and from how many ranks on each of them it is so: docs/how_zero1_works.md has these.
    for nodes, least in ((1, None), (2, 5), (3, 4), (4, 3), (5, 3), (40, 3)):
        for on_node in range(1, 9):
            topology = Topology(tuple(rank // on_node for rank in range(2 * nodes * on_node)))
            groups = ShardGroups.chosen(nodes * on_node, topology)
            assert groups.rings_carry_more(topology) is (least is not None and on_node >= least), (nodes, on_node)
            assert groups.rings_carry_more(None) is False
