"""Where the tests' trainings run: on CPUs over Gloo, or all ranks on one GPU, over NCCL."""

import os

import torch
import torch.distributed as dist

VARIABLE = "PARSTRAT_TEST_DEVICE"
"""Names the kind of device to the ranks of a pool, which then need not be told."""


def kind() -> str:
    """``"cpu"`` or ``"cuda"``."""
    return os.environ.get(VARIABLE, "cpu")


def device() -> torch.device:
    """That of this rank; all ranks share one GPU."""
    return torch.device("cuda", 0) if kind() == "cuda" else torch.device("cpu")


def backend() -> str:
    """The process group's, as Lightning chooses it."""
    return "nccl" if kind() == "cuda" else "gloo"


def become(chosen: str, rank: int) -> None:
    """Makes this process a rank on that kind of device, before it joins a process group."""
    os.environ[VARIABLE] = chosen
    if chosen == "cuda":
        # NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", NODE_RANK=str(rank))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.cuda.set_device(0)
        # What is compared with a CPU, or with other sizes of batches, is computed in fp32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def meet() -> float:
    """The sum over ranks of 1 and their number: whether they can speak to each other at all."""
    total = torch.full((), dist.get_rank() + 1.0, device=device())
    dist.all_reduce(total)
    return float(total)
