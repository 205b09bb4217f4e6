"""Ranks of one start after another over a store that outlives them all."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_parstrat.distributed.comm.agent_store import connect_agent_store

SECONDS = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(store: dist.TCPStore, world_size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as ranks:
        # The last one comes first: whoever answers is not there yet.
        asked = [
            ranks.submit(connect_agent_store, "localhost", store.port, rank, world_size, SECONDS)
            for rank in reversed(range(world_size))
        ]
        return [one.result() for one in reversed(asked)]


def leave_a_rank_without_answer(store: dist.TCPStore, rank: int) -> None:
    """As a rank does whose rank 0 is gone."""
    with pytest.raises(dist.DistError):
        connect_agent_store("localhost", store.port, rank, rank + 1, timedelta(milliseconds=300))


def test_each_start_finds_nothing_of_the_one_before(store: dist.TCPStore) -> None:
    for number, world_size in enumerate((3, 4, 2, 1, 3)):
        leave_a_rank_without_answer(store, rank=2)
        stores = start(store, world_size)
        assert not any(one.check(["address"]) for one in stores)
        stores[0].set("address", str(number))
        assert [one.get("address") for one in stores] == [str(number).encode()] * world_size


def test_a_rank_that_does_not_come_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1, 2\] of 3"):
        connect_agent_store("localhost", store.port, 0, 3, timedelta(seconds=2))
