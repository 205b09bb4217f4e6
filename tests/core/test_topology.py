import pytest

from lightning_parstrat.core.topology import Topology


@pytest.mark.parametrize(
    ("keys", "nodes", "two_levels"),
    [
        ("aaaa", (0, 0, 0, 0), False),
        ("aabb", (0, 0, 1, 1), True),
        ("abab", (0, 1, 0, 1), True),
        ("bbaa", (0, 0, 1, 1), True),
        ("aab", (0, 0, 1), False),
        ("abcd", (0, 1, 2, 3), False),
        ("aabbcc", (0, 0, 1, 1, 2, 2), True),
        ("a", (0,), False),
    ],
)
def test_nodes_are_numbered_and_two_levels_need_equal_nodes_of_several(
    keys: str, nodes: tuple[int, ...], two_levels: bool
) -> None:
    topology = Topology.of(keys)
    assert topology.nodes == nodes
    assert topology.world_size == len(keys)
    assert topology.has_two_levels is two_levels


def test_all_ranks_may_be_on_one_node() -> None:
    assert Topology.flat(3) == Topology.of("xxx")


@pytest.mark.parametrize(
    ("keys", "rank", "mates", "counterparts"),
    [
        ("aabb", 0, (0, 1), (0, 2)),
        ("aabb", 3, (2, 3), (1, 3)),
        ("abab", 2, (0, 2), (2, 3)),
        ("abba", 2, (1, 2), (3, 2)),
        ("aaabbb", 4, (3, 4, 5), (1, 4)),
    ],
)
def test_mates_share_a_node_and_counterparts_a_place(
    keys: str, rank: int, mates: tuple[int, ...], counterparts: tuple[int, ...]
) -> None:
    topology = Topology.of(keys)
    assert topology.node_mates(rank) == mates
    assert topology.counterparts(rank) == counterparts


@pytest.mark.parametrize("keys", ["aabb", "abab", "abba", "aaabbb", "aabbcc", "abcabc"])
def test_every_rank_is_in_one_row_and_one_column(keys: str) -> None:
    topology = Topology.of(keys)
    for rank in range(len(keys)):
        for mate in topology.node_mates(rank):
            assert topology.share_node(rank, mate)
            assert set(topology.counterparts(mate)) & set(topology.node_mates(rank)) == {mate}
        everyone = [other for mate in topology.node_mates(rank) for other in topology.counterparts(mate)]
        assert sorted(everyone) == list(range(len(keys)))
