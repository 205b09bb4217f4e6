"""Keeps ranks that torchrun has restarted from reading what earlier ranks left in the agent's store.

torchrun's agent outlives its ranks, and so does its store, in which they find each other. The store does not separate
one start from the next: each agent counts its own restarts. So restarted ranks would find the addresses of ranks that
have ended, and wait for them forever. Here, ranks agree on a prefix that no earlier start has used.
"""

import atexit
import time
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_SECONDS_BETWEEN_LOOKS = 0.01


def connect_agent_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta = dist.default_pg_timeout
) -> Store:
    """Connects to the store of torchrun's agent, under a prefix that only the ranks of this start know.

    Collective: all ranks of this start must call it. It costs a few messages between each rank and the store.

    Args:
        address: Host on which the agent listens.
        port: Port on which the agent listens.
        rank: This rank.
        world_size: Number of ranks in this start.
        timeout: How long to wait for other ranks.

    Returns:
        The store, to make a process group with.

    Raises:
        torch.distributed.DistStoreError: Other ranks, or the agent, did not answer in time.
    """
    # Never the master: the agent serves this port, and a master here would fail to bind it.
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    prefix = _hand_out_prefix(store, world_size, timeout) if rank == 0 else _ask_for_prefix(store, rank)
    return PrefixStore(prefix, store)


def join_over_store(
    store: Store, backend: str, rank: int, world_size: int, device: torch.device | None, timeout: timedelta | None
) -> None:
    """Creates the default process group over a store. Collective.

    Args:
        store: The store of :func:`connect_agent_store`.
        backend: The backend of the process group.
        rank: This rank.
        world_size: Number of ranks in this start.
        device: If it is given, NCCL connects at once.
        timeout: The timeout of the process group. None for the backend's default.
    """
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device, timeout=timeout)
    if backend == "nccl":
        # As Lightning does: torch warns of NCCL groups that a process does not destroy.
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _ask_for_prefix(store: Store, rank: int) -> str:
    # A fresh name: an answer to it was meant for this start. `get` blocks until the answer.
    own = f"parstrat/{uuid4().hex}"
    store.set(_place(rank), own)
    prefix: str = store.get(own).decode()
    # Rank 0 answers until it sees this, so that no rank can miss the answer.
    store.set(_receipt(prefix, rank), "")
    return prefix


def _hand_out_prefix(store: Store, world_size: int, timeout: timedelta) -> str:
    """Answers every request, even those of ranks that have ended, until each rank of this start has confirmed."""
    prefix = f"parstrat/{uuid4().hex}"
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if store.check([_receipt(prefix, rank)]):
                waiting.remove(rank)
            # Again in every round: the request may be an earlier start's, which the live rank will overwrite.
            elif store.check([_place(rank)]):
                store.set(store.get(_place(rank)).decode(), prefix)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(waiting)} of {world_size} did not join within {timeout}")
        time.sleep(_SECONDS_BETWEEN_LOOKS if waiting else 0.0)
    return prefix


def _place(rank: int) -> str:
    return f"parstrat/asks/{rank}"


def _receipt(prefix: str, rank: int) -> str:
    return f"{prefix}/received/{rank}"
