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


def join_over_agent_store(
    address: str, port: int, rank: int, world_size: int, device: torch.device, backend: str, timeout: timedelta | None
) -> None:
    """Creates the default process group over the agent's store, under a prefix that only this start's ranks know.

    Collective: all ranks of this start must call it. It costs a few messages between each rank and the store.

    Args:
        address: Host on which the agent listens.
        port: Port on which the agent listens.
        rank: This rank.
        world_size: Number of ranks in this start.
        device: The rank's device. NCCL connects at once.
        backend: The backend of the process group.
        timeout: How long to wait for other ranks, and the timeout of the process group. None for torch's defaults.

    Raises:
        torch.distributed.DistStoreError: Other ranks, or the agent, did not answer in time.
    """
    patience = timeout or dist.default_pg_timeout
    # Never the master: the agent serves this port, and a master here would fail to bind it.
    store = TCPStore(address, port, is_master=False, timeout=patience)
    # Fresh names. An answer to this rank's name was meant for this start.
    prefix = f"parstrat/{uuid4().hex}"
    if rank == 0:
        _hand_out(prefix, store, world_size, patience)
    else:
        store.set(f"parstrat/asks/{rank}", prefix)
        # `get` blocks until the answer.
        prefix = store.get(prefix).decode()
        # Rank 0 answers until it sees this, so that no rank can miss the answer.
        store.set(f"{prefix}/received/{rank}", "")
    dist.init_process_group(
        backend,
        store=PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        # As Lightning does: NCCL then knows its device. And torch warns of NCCL groups that a process does not destroy.
        device_id=None if device.type == "cpu" else device,
        timeout=timeout,
    )
    if backend == "nccl":
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def _hand_out(prefix: str, store: Store, world_size: int, timeout: timedelta) -> None:
    """Answers every request, even those of ranks that have ended, until each rank of this start has confirmed."""
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"{prefix}/received/{rank}"]):
                waiting.remove(rank)
            # Again in every round: the request may be an earlier start's, which the live rank will overwrite.
            elif store.check([f"parstrat/asks/{rank}"]):
                store.set(store.get(f"parstrat/asks/{rank}").decode(), prefix)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(waiting)} of {world_size} did not join within {timeout}")
        time.sleep(_SECONDS_BETWEEN_LOOKS if waiting else 0.0)
