"""Rounds in which each chunk's sum is made once, by whoever owns it, in messages as few as the logarithm asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.halving import MOST_BY_PAIRS, HalvingPlan, halving_plan, round_sizes
from lightning_parstrat.core.topology import Topology

nodes = st.tuples(st.integers(1, 12), st.integers(1, 12))
topologies = st.one_of(
    st.integers(1, 80).map(Topology.flat),
    # Ranks of a node side by side, and dealt out in turns.
    nodes.map(lambda sizes: Topology.of([rank // sizes[0] for rank in range(sizes[0] * sizes[1])])),
    nodes.map(lambda sizes: Topology.of([rank % sizes[1] for rank in range(sizes[0] * sizes[1])])),
)


def summed(plans: list[HalvingPlan]) -> list[dict[int, set[int]]]:
    """For each rank, whose contributions are in its sum of each chunk, after each rank has gone through its rounds."""
    ranks = range(len(plans))
    sums = [{owner: {rank} for owner in ranks} for rank in ranks]
    for number in range(len(plans[0].rounds)):
        before = [dict(of_rank) for of_rank in sums]
        for rank in ranks:
            order, of_round = plans[rank].order, plans[rank].rounds[number]
            start, stop = of_round.own
            sums[rank] = {}
            for owner in order[start:stop]:
                parts = [before[mate][owner] for mate in of_round.ranks]
                # Nobody's contribution comes twice.
                assert sum(map(len, parts)) == len(set().union(*parts))
                sums[rank][owner] = set().union(*parts)
    return sums


@given(topologies)
def test_each_rank_ends_with_the_sum_of_its_own_chunk(topology: Topology) -> None:
    ranks = range(topology.world_size)
    plans = [halving_plan(rank, topology) for rank in ranks]
    for plan, rank in zip(plans, ranks, strict=True):
        assert sorted(plan.order) == list(ranks)
        for number, of_round in enumerate(plan.rounds):
            assert of_round.ranks[of_round.place] == rank
            # All who meet agree who takes what.
            for mate in of_round.ranks:
                others = plans[mate].rounds[number]
                assert (others.ranks, others.cuts) == (of_round.ranks, of_round.cuts)
    assert summed(plans) == [{rank: set(ranks)} for rank in ranks]


@given(topologies.filter(lambda topology: topology.has_two_levels))
def test_what_goes_to_other_nodes_has_been_summed_over_the_node(topology: Topology) -> None:
    for rank in range(topology.world_size):
        rounds = halving_plan(rank, topology).rounds
        near = [len({topology.nodes[mate] for mate in of_round.ranks}) == 1 for of_round in rounds]
        within = near.count(True)
        assert near == [True] * within + [False] * (len(rounds) - within)
        # A node's sum travels in the dtype of gradients, as does what comes first.
        assert [of_round.sends_sums for of_round in rounds] == [n not in (0, within) for n in range(len(rounds))]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, []), (8, [8]), (48, [8, 6]), (64, [8, 8]), (512, [8, 8, 8]), (1000, [8, 5, 5, 5]), (62, [31, 2])],
)
def test_sizes_of_rounds(ranks: int, sizes: list[int]) -> None:
    assert round_sizes(ranks) == sizes


def test_few_ranks_meet_in_one_round_and_nodes_in_two() -> None:
    few = MOST_BY_PAIRS
    assert [len(of_round.ranks) for of_round in halving_plan(0, Topology.flat(few)).rounds] == [few]
    two_nodes = Topology.of([rank % 2 for rank in range(few)])
    assert [len(of_round.ranks) for of_round in halving_plan(0, two_nodes).rounds] == [few // 2, 2]


def test_ranks_in_their_order_need_no_other() -> None:
    assert halving_plan(3, Topology.flat(64)).order == range(64)
    # Not as many on each node.
    assert halving_plan(3, Topology.of("aab" * 12)).order == range(36)
