"""Makes modules equal on all ranks: compares them, then copies rank 0's tensors whenever DDP would."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_parstrat.core.digests import digest
from lightning_parstrat.distributed.comm.agreement import check_agreement
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.work import marked, waiting
from lightning_parstrat.distributed.torch_compat import copy_all, names_ignored_by_ddp

_TOGETHER_BYTES = 250 * 2**20
"""Bytes of several tensors in one broadcast. DDP uses the same number."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copies rank 0's tensors to all. Collective. Each byte is sent once per rank, in messages of up to 250 MB."""
    detached = [tensor.detach() for tensor in tensors if tensor.numel()]
    if detached and dist.get_world_size(group) > 1:
        with marked("lightning_parstrat: broadcast tensors of the module"), waiting():
            for together in _travel_together(detached):
                parts = [tensor.reshape(-1) for tensor in together]
                # Gloo sends memory, whatever the strides.
                flat = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
                dist.broadcast(flat, group=group, group_src=0)
                pieces = torch.split(flat, [part.numel() for part in parts])
                copy_all(together, [piece.view_as(tensor) for piece, tensor in zip(pieces, together, strict=True)])


def _travel_together(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, as many at once as fit."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.dtype, tensor.device].append(tensor)
    for alike in by_kind.values():
        together, nbytes = list[Tensor](), 0
        for tensor in alike:
            if together and nbytes + tensor.nbytes > _TOGETHER_BYTES:
                yield together
                together, nbytes = [], 0
            together.append(tensor)
            nbytes += tensor.nbytes
        yield together


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's parameters and buffers, as DDP does in its constructor. Collective.

    Names in ``module._ddp_params_and_buffers_to_ignore`` are left out, as by DDP.
    """
    ignored = names_ignored_by_ddp(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    broadcast_tensors((tensor for name, tensor in named if name not in ignored), group)


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's buffers, as DDP does before each synchronized forward. Collective."""
    ignored = names_ignored_by_ddp(module)
    broadcast_tensors((buffer for name, buffer in module.named_buffers() if name not in ignored), group)


def refuse_captured_graphs(module: nn.Module) -> None:
    """Raises an error if any part of the module was given to ``torch.cuda.make_graphed_callables``."""
    # That function sets `forward` on the instance. A function has the module of its definition.
    forwards = (vars(child).get("forward") for child in module.modules())
    if any(getattr(forward, "__module__", None) == "torch.cuda.graphs" for forward in forwards):
        raise ValueError(
            "A part of the module replays a CUDA graph that was captured before the training. The graph would read the"
            " parameters' old memory. Train by `ddp`, or by `zero1_custom` with `torch.cuda.make_graphed_callables` in"
            " `on_train_start`."
        )


def check_whole(module: nn.Module, flag: str) -> None:
    """Raises an error for a module whose parameters are in shards. Not collective.

    Names in ``module._ddp_params_and_buffers_to_ignore`` are left out, as by DDP.

    Args:
        module: The module.
        flag: The flag of the strategy that needs whole parameters.

    Raises:
        ValueError: An earlier training by ``zero3_custom``, or the user, has sharded the module.
    """
    ignored = names_ignored_by_ddp(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and name not in ignored:
            raise ValueError(
                f"{name!r} is in shards (a DTensor): zero3_custom has trained it, or `fully_shard` or"
                f" `parallelize_module` was called. {flag} needs whole ones. Leave these calls out. Or make a new"
                " module, and load a checkpoint into it. zero3_custom also trains the module that it has sharded."
            )


def check_same_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares names, shapes and dtypes of parameters and buffers over all ranks, before any of them is broadcast.

    Collective: one all-reduce of 16 bytes. Names in ``module._ddp_params_and_buffers_to_ignore`` are left out.

    Args:
        module: The module.
        group: A group that works on host memory.

    Raises:
        ValueError: The modules differ, so that a broadcast between them would hang. Or a parameter has no shape yet.
    """
    ignored = names_ignored_by_ddp(module)
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = next((name for name, one in named if is_lazy(one)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy!r} has no shape yet: a lazy module was not called. Call it once on a batch, such as in"
            " `configure_model`."
        )
    specs = [(name, tuple(one.shape), str(one.dtype)) for name, one in named if name not in ignored]
    check_agreement(make_collectives(group, torch.device("cpu")), digest(specs))
