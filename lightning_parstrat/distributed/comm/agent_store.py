"""Ranks that torchrun has started again do not read what those before them have left behind.

torchrun's agent outlives its ranks and keeps the store over which they find each other. Nothing in it tells one start
from the next: the number of restarts is each agent's own. So ranks started anew would look for the addresses of those
that are gone, and wait for them forever. Here they agree on a prefix that is theirs alone.
"""

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_SECONDS_BETWEEN_LOOKS = 0.01


def connect_agent_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta = dist.default_pg_timeout
) -> Store:
    """Connects to the store of torchrun's agent, under a prefix that only the ranks of this start know.

    Collective. A few messages between each rank and the store.

    Args:
        address: Where the agent listens.
        port: Of the same.
        rank: This one's number.
        world_size: How many ranks there are in this start.
        timeout: How long to wait for other ranks.

    Returns:
        The store, to make a process group with.

    Raises:
        torch.distributed.DistStoreError: Other ranks, or the agent, did not answer in time.
    """
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    prefix = _hand_out_prefix(store, world_size, timeout) if rank == 0 else _ask_for_prefix(store, rank)
    return PrefixStore(prefix, store)


def _ask_for_prefix(store: Store, rank: int) -> str:
    # Nobody has ever answered to this name, so that what comes was meant for this start.
    own = f"parstrat/{uuid4().hex}"
    store.set(_place(rank), own)
    prefix: str = store.get(own).decode()
    store.set(_receipt(prefix, rank), "")
    return prefix


def _hand_out_prefix(store: Store, world_size: int, timeout: timedelta) -> str:
    """Answers whoever has asked, be it a rank that is long gone, until all that there are have said thanks."""
    prefix = f"parstrat/{uuid4().hex}"
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if store.check([_receipt(prefix, rank)]):
                waiting.remove(rank)
            elif store.check([_place(rank)]):
                store.set(store.get(_place(rank)).decode(), prefix)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(waiting)} of {world_size} did not come within {timeout}")
        time.sleep(_SECONDS_BETWEEN_LOOKS if waiting else 0.0)
    return prefix


def _place(rank: int) -> str:
    return f"parstrat/asks/{rank}"


def _receipt(prefix: str, rank: int) -> str:
    return f"{prefix}/received/{rank}"
