"""Compression of a DistributedDataParallel's gradients: torch's own hooks, by name."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.ddp.ddp_compat import comm_hook_states

_SETTLING_STEPS = 3
"""A new reducer orders its buckets anew after its first step, that of a static graph after its second."""

CommHook = Literal["bf16", "fp16", "powersgd"] | None


def bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The ``bf16_compress_hook`` of torch, under a name that torch does not refuse without NCCL: Gloo can do it."""
    return default_hooks.bf16_compress_hook(state, bucket)


def powersgd_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The hook of torch, one bucket at a time where there is no NCCL.

    It launches its second all-reduce when the first has ended, and waits for it in a thread of Gloo. With several
    buckets in flight, ranks would launch these in different orders until all threads wait.
    """
    arrived: torch.futures.Future[Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu" or dist.get_backend(state.process_group) == "gloo":
        arrived.wait()
    return arrived


_HOOKS: dict[str, Any] = {
    "bf16": bf16_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powersgd_hook,
}


def register_comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    """Sends all gradients through the hook of that name, on any device. All ranks must call it.

    ``"bf16"`` and ``"fp16"`` halve the bytes of fp32 gradients, and sum them in 16 bits. ``"powersgd"`` sends an
    approximation of rank 1 from the 1,000th step on, and keeps the errors in memory: T. Vogels, S. P. Karimireddy and
    M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (arXiv 1905.13727).
    """
    state = powerSGD_hook.PowerSGDState(process_group=ddp.process_group) if name == "powersgd" else ddp.process_group
    ddp.register_comm_hook(state, _HOOKS[name])


def forget_buckets(ddp: DistributedDataParallel) -> None:
    """Has PowerSGD begin anew: what it has kept of each bucket does not fit others. All ranks must call it."""
    for state in comm_hook_states(ddp):
        if isinstance(state, powerSGD_hook.PowerSGDState):
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
            # Until then gradients travel as they are: errors that were kept would be of buckets that do not stay.
            state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + _SETTLING_STEPS)
