"""Which ranks share a node."""

from lightning_parstrat.core.topology import Topology


def test_nodes_are_numbered_and_two_levels_need_equal_nodes_of_several() -> None:
    for keys, nodes, two_levels in (
        ("aaaa", (0, 0, 0, 0), False),
        ("aabb", (0, 0, 1, 1), True),
        ("abba", (0, 1, 1, 0), True),
        ("bbaa", (0, 0, 1, 1), True),
        ("aab", (0, 0, 1), False),
        ("abcd", (0, 1, 2, 3), False),
        ("aabbcc", (0, 0, 1, 1, 2, 2), True),
        ("a", (0,), False),
    ):
        topology = Topology.of(keys)
        assert (topology.nodes, topology.world_size, topology.has_two_levels) == (nodes, len(keys), two_levels)
        for rank in range(len(keys) if two_levels else 0):
            # Every rank is in one row and one column.
            for mate in topology.node_mates(rank):
                assert topology.nodes[rank] == topology.nodes[mate]
                assert set(topology.counterparts(mate)) & set(topology.node_mates(rank)) == {mate}
            everyone = [other for mate in topology.node_mates(rank) for other in topology.counterparts(mate)]
            assert sorted(everyone) == list(range(len(keys)))


def test_counterparts_have_the_same_index_on_their_nodes() -> None:
    assert Topology.of("abba").counterparts(2) == (3, 2) and Topology.of("abab").counterparts(2) == (2, 3)
    assert Topology.of("aaabbb").counterparts(4) == (1, 4) and Topology.of("aabb").node_mates(3) == (2, 3)
