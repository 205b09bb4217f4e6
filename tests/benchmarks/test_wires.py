"""Messages and connections of Gloo's operations fit together over all ranks."""

import math
from typing import get_args

import pytest

from benchmarks.scale.events import Kind
from benchmarks.scale.wires import GLOO, gloo_hops, gloo_messages, gloo_peers

SIZES = [2, 3, 8, 13, 64]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [kind for kind in get_args(Kind) if kind not in ("send", "recv")])
def test_a_connection_has_two_ends(kind: Kind, size: int) -> None:
    root = size // 2 if kind in ("broadcast", "gather", "scatter") else None
    peers = [gloo_peers(kind, rank, size, root) for rank in range(size)]
    assert all(peers)
    for rank, of_rank in enumerate(peers):
        assert rank not in of_rank and of_rank <= set(range(size))
        assert all(rank in peers[other] for other in of_rank)


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_all_ranks(size: int) -> None:
    def sent(kind: Kind, nbytes: int, root: int | None = None) -> int:
        return sum(gloo_messages(kind, nbytes, rank, size, root) for rank in range(size))

    # Everybody but the root gets it, or gives it, once.
    assert sent("broadcast", 4, 1) == sent("gather", 4, 1) == sent("scatter", 4, 1) == size - 1
    assert sent("all_to_all", 4 * size) == size * (size - 1)
    # Two parts for each rank, each of which passes every rank but one, twice.
    assert sent("all_reduce", 4 * 64 * size) == size * 2 * 2 * (size - 1)


def test_a_ring_is_as_long_as_there_are_ranks_and_a_tree_is_not() -> None:
    assert [gloo_hops("all_reduce", 4, size) for size in SIZES] == [2 * (size - 1) for size in SIZES]
    assert [gloo_hops("broadcast", 4, size) for size in SIZES] == [math.ceil(math.log2(size)) for size in SIZES]


def test_what_is_sent_takes_no_time_of_its_own() -> None:
    assert GLOO.seconds("send", 1000, 8) == 0
    assert GLOO.seconds("recv", 1000, 8) == pytest.approx(40e-6 + 1e-6)
