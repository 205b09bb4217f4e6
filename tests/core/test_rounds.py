"""Rounds of messages: everybody comes to know what each rank has said, once, in few messages."""

import math

import pytest

from lightning_parstrat.core.rounds import Rounds, exchange_rounds

WORLD_SIZES = [*range(1, 40), 47, 64, 95, 100, 128, 512, 1000, 1024]


def heard_by_all(rounds: list[Rounds]) -> list[list[int]]:
    """What each rank knows in the end: the numbers of ranks, as often as they have been added up."""
    known = [[rank] for rank in range(len(rounds))]
    for rank, own in enumerate(rounds):
        if own.speaks_for is not None:
            assert rounds[own.speaks_for].left_to == rank
            known[rank] = known[rank] + known[own.speaks_for]
    for number in range(max(len(own.groups) for own in rounds)):
        before = list(known)
        for rank, own in enumerate(rounds):
            if own.groups:
                assert rank in own.groups[number]
                assert all(rounds[mate].groups[number] == own.groups[number] for mate in own.groups[number])
                known[rank] = [one for mate in own.groups[number] for one in before[mate]]
    for rank, own in enumerate(rounds):
        if own.left_to is not None:
            known[rank] = known[own.left_to]
    return known


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_hear_each_rank_once_and_in_the_same_order(world_size: int) -> None:
    rounds = [exchange_rounds(rank, world_size) for rank in range(world_size)]
    known = heard_by_all(rounds)
    assert sorted(known[0]) == list(range(world_size))
    assert all(of_rank == known[0] for of_rank in known)
    taking_part = sum(own.left_to is None for own in rounds)
    assert taking_part >= 0.75 * world_size
    latencies = len(rounds[0].groups) + 2 * (taking_part < world_size)
    assert latencies <= math.log2(world_size) / 2 + 4


@pytest.mark.parametrize("world_size", [n for n in WORLD_SIZES if n > 1])
def test_a_rank_sends_at_most_twice_the_logarithm(world_size: int) -> None:
    assert max(exchange_rounds(rank, world_size).messages for rank in range(world_size)) <= 2 * math.log2(world_size)


@pytest.mark.parametrize(("world_size", "messages"), [(1, 0), (2, 1), (3, 2), (4, 3), (64, 9), (512, 13), (1024, 15)])
def test_the_numbers_in_the_docstring(world_size: int, messages: int) -> None:
    assert {exchange_rounds(rank, world_size).messages for rank in range(world_size)} == {messages}


@pytest.mark.parametrize(
    ("world_size", "one_exchange"), [(1, True), (2, True), (3, True), (4, True), (5, False), (8, False)]
)
def test_up_to_four_ranks_need_nothing_that_was_heard_to_be_sent_on(world_size: int, one_exchange: bool) -> None:
    assert exchange_rounds(0, world_size).is_one_exchange is one_exchange
