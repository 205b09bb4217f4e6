"""What gradients of a DistributedDataParallel are compressed to: torch's own hooks, by name."""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

CommHook = Literal["bf16", "fp16", "powersgd"] | None


class NamedHook(NamedTuple):
    """A hook that has a name.

    Attributes:
        wire_dtype: What gradients travel in; None where that depends on more than their size.
    """

    hook: Any
    wire_dtype: torch.dtype | None


def bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Is the ``bf16_compress_hook`` of torch, which refuses it by its name where there is no NCCL; Gloo can do it."""
    return default_hooks.bf16_compress_hook(state, bucket)


def powersgd_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Is the hook of torch, with one bucket at a time where there is no NCCL.

    It launches its second all-reduce when the first has ended, and waits for it in a thread of Gloo. With several
    buckets under way ranks launch them in different orders, and all threads come to wait.
    """
    arrived: torch.futures.Future[Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu" or dist.get_backend(state.process_group) == "gloo":
        arrived.wait()
    return arrived


_HOOKS: dict[str, NamedHook] = {
    "bf16": NamedHook(bf16_hook, torch.bfloat16),
    "fp16": NamedHook(default_hooks.fp16_compress_hook, torch.float16),
    "powersgd": NamedHook(powersgd_hook, None),
}


def wire_dtype(name: CommHook) -> torch.dtype | None:
    """What gradients travel in with the hook of that name; None where that is their own dtype, or is not known."""
    return None if name is None else _HOOKS[name].wire_dtype


def register_comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    """Has all gradients go through the hook of that name, whatever the device. All ranks must.

    ``"bf16"`` and ``"fp16"`` halve the bytes of fp32 gradients, and sum them in 16 bits. ``"powersgd"`` sends an
    approximation of rank 1 from the 1,000th step on, and has memory for the errors: T. Vogels, S. P. Karimireddy and
    M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (arXiv 1905.13727).
    """
    state = powerSGD_hook.PowerSGDState(process_group=ddp.process_group) if name == "powersgd" else ddp.process_group
    ddp.register_comm_hook(state, _HOOKS[name].hook)
