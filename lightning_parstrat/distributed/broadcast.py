"""All ranks get rank 0's tensors, when DDP would give them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies tensors from one rank to all. Collective; each byte travels once per rank, coalesced up to 250 MB."""
    detached = [tensor.detach() for tensor in tensors]
    if detached and dist.get_world_size(group) > 1:
        dist._broadcast_coalesced(  # type: ignore[attr-defined]
            group, detached, 250 * 2**20, source
        )


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's parameters and buffers, as DDP does when it is created. Collective.

    Names in ``module._ddp_params_and_buffers_to_ignore`` are left out, as by DDP.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [*module.named_parameters(), *module.named_buffers()]
    broadcast_tensors((tensor for name, tensor in named if name not in ignored), group)


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's buffers, as DDP does before each synchronised forward. Collective."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    broadcast_tensors((buffer for name, buffer in module.named_buffers() if name not in ignored), group)
