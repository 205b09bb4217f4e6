"""Gradient clipping over shards: the norm costs one scalar all-reduce and no gather."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.norms import accumulation_dtype, clip_coefficient, partial_norm, total_norm
from lightning_parstrat.distributed.sharding import OptimizerSharding


@torch.no_grad()
def clip_gradients_by_norm(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales the shards' gradients so that the norm of the whole gradient is at most ``max_norm``.

    Collective: one all-reduce of a scalar, and two passes over this rank's shards. Equal to
    ``torch.nn.utils.clip_grad_norm_`` over the optimizer's full parameters, on every rank. Nothing waits on the host.

    Args:
        optimizer: A sharded optimizer after its backward.
        max_norm: The largest norm allowed.
        norm_type: p > 0, or ``math.inf``.

    Returns:
        The norm before clipping, a 0-d tensor on the parameters' device.
    """
    sharding: OptimizerSharding = optimizer._sharding  # type: ignore[attr-defined]
    sharding.finish_gradients()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stepped = sharding.stand_ins(parameters)
    # What every rank steps whole is counted once.
    counted = [tensor for tensor in stepped if tensor not in sharding.whole or sharding.reducer.collectives.rank == 0]
    norm = _norm_over_ranks(sharding, _gradients(counted), norm_type, accumulation_dtype(p.dtype for p in parameters))
    if gradients := _gradients(stepped):
        torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
    return norm


@torch.no_grad()
def clip_gradients_by_value(optimizer: Optimizer, max_value: float) -> None:
    """Clamps every element of the shards' gradients to ``[-max_value, max_value]``. Waits for the gradients."""
    sharding: OptimizerSharding = optimizer._sharding  # type: ignore[attr-defined]
    sharding.finish_gradients()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    stepped = [tensor for tensor in sharding.stand_ins(parameters) if tensor.grad is not None]
    if stepped:
        torch.nn.utils.clip_grad_value_(stepped, max_value)


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _norm_over_ranks(
    sharding: OptimizerSharding, gradients: list[Tensor], norm_type: float, dtype: torch.dtype
) -> Tensor:
    combined = partial_norm(gradients, norm_type, dtype, sharding.device)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    sharding.reducer.collectives.all_reduce(combined, op=op).wait()
    return total_norm(combined, norm_type)
