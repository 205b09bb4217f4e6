"""A temporary process group, to see whether ranks find each other."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def backend_here() -> str:
    """If this process sees several GPUs, NCCL. Otherwise Gloo: two ranks of one machine may share one GPU."""
    return "nccl" if torch.cuda.device_count() > 1 and dist.is_nccl_available() else "gloo"


def meet(where: str, rank: int, size: int, local_rank: int, own: Any, seconds: float) -> list[Any]:
    """The values of all ranks, after a first sum on the devices that a training would use. Collective.

    Args:
        where: The address at which they connect, in the form of ``init_process_group``.
        rank: This process's rank.
        size: The number of ranks.
        local_rank: This process's rank on its node, which chooses its GPU.
        own: This rank's value.
        seconds: How long each step may take.
    """
    device = torch.device("cpu")
    if backend_here() == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_here(), init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    dist.all_reduce(torch.ones(1, device=device))
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, own)
    dist.destroy_process_group()
    return ranks
