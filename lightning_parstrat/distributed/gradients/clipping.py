"""Clipping by the norm of the unsharded gradient, which lies in shards (one scalar all-reduce) or on every rank.

For the p-norm, every rank contributes ``sum |g|^p`` of the gradients that it owns. For the maximum norm it contributes
``max |g|``. The sum (the maximum) over ranks gives the norm of all gradients, since exactly one rank owns each element.
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import marked
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.stepping import SHARDING, OptimizerSharding
from lightning_parstrat.distributed.torch_compat import multiply_all, norm_all

_WIDE = (torch.float32, torch.float64)
_64_BITS = (torch.float64, torch.complex128)


class NonfiniteGradientError(RuntimeError):
    """Gradients became NaN or infinite on some rank. All ranks raise it."""


class StepGradients(NamedTuple):
    """The gradients that this rank is about to step with.

    Attributes:
        stepped: All of them. Scaling them clips.
        counted: The gradients that this rank adds to the norm. Each element of the gradient is counted once.
        dtype: The dtype in which norms are summed, the same on all ranks.
        device: The device of the gradients.
        collectives: Combines the norms of all ranks. If every rank counts all gradients, None.
    """

    stepped: list[Tensor]
    counted: list[Tensor]
    dtype: torch.dtype
    device: torch.device
    collectives: Collectives | None

    def maximum_over_ranks(self, value: Tensor) -> Tensor:
        """The largest of all ranks' values of a 0-d tensor, in place.

        If gradients are sharded, it is collective. Nothing waits on the host.
        """
        if self.collectives is not None:
            self.collectives.all_reduce(value, op=dist.ReduceOp.MAX).wait()
        return value


@torch.no_grad()
def step_gradients(optimizers: Sequence[Optimizer]) -> StepGradients:
    """Finds the gradients of ``optimizers``. A parameter in several of them counts once.

    If the state of any is sharded, it is collective: it waits for the reductions.
    """
    # A parameter in two groups or optimizers has one gradient.
    parameters = list(dict.fromkeys(p for o in optimizers for group in o.param_groups for p in group["params"]))
    shardings = [sharding for sharding in map(hidden_sharding, optimizers) if sharding is not None]
    for sharding in shardings:
        sharding.finish_gradients()
    slots = {parameter: slot for sharding in shardings for parameter, slot in sharding.slots.items()}
    distributed = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    replicated_parameters = [p for p in parameters if p not in slots and not isinstance(p, DTensor)]
    shards = [slots[parameter].shard for parameter in parameters if parameter in slots]
    own = _gradients(shard for shard in shards if shard is not None)
    collectives = shardings[0].reducer.collectives if shardings else None
    if distributed and dist.group.WORLD is not None:
        collectives = make_collectives(dist.group.WORLD, distributed[0].device)
    # A replicated gradient is counted once, and so is a shard that several groups hold.
    counts_replicated = collectives is None or collectives.rank == 0
    counts_own = collectives is None or collectives.place.copy == 0
    replicated = _gradients(replicated_parameters)
    return StepGradients(
        stepped=own + [local(gradient) for gradient in _gradients(distributed)] + replicated,
        counted=(own if counts_own else [])
        + [local(gradient) for gradient in _gradients(one for one in distributed if is_counted(one))]
        + (replicated if counts_replicated else []),
        # 16-bit sums would overflow.
        dtype=torch.float64 if any(p.dtype in _64_BITS for p in parameters) else torch.float32,
        device=parameters[0].device if parameters else torch.device("cpu"),
        collectives=collectives,
    )


def is_counted(parameter: Tensor, first: int = 0) -> bool:
    """Whether this rank counts its part of a parameter. If several ranks hold the same elements, one of them does.

    Args:
        parameter: The parameter, or this rank's view of it.
        first: The rank that counts, or whose mesh does. It is the first of those that hold the parameter.
    """
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == first
    mesh = parameter.device_mesh
    is_replicated = [placement.is_replicate() for placement in parameter.placements]
    return _has(mesh, first) and not any(map(operator.mul, is_replicated, mesh.get_coordinate() or ()))


@functools.cache
def _has(mesh: DeviceMesh, rank: int) -> bool:
    return rank in mesh.mesh


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether there are gradients to step with. If gradients are sharded, the answer is the same on all ranks.

    If gradients are sharded, it is collective: it waits for the reductions.
    """
    sharding = hidden_sharding(optimizer)
    if sharding is not None:
        sharding.finish_gradients()
        if any(bucket.has_gradients for bucket in sharding.buckets):
            return True
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


@torch.no_grad()
def gradient_norm(gradients: StepGradients, norm_type: float = 2.0) -> Tensor:
    """The norm of the unsharded gradient, on every rank. Nothing waits on the host.

    It equals ``torch.nn.utils.get_total_norm`` of the full gradients. If every rank has all gradients, it does so to
    the last bit. Only sums of 16 bits differ: they are made in fp32. It is one pass over the gradients that this rank
    counts. If gradients are sharded, it is collective: one all-reduce of 8 bytes, or of 16 for the maximum norm.

    Args:
        gradients: See :func:`step_gradients`.
        norm_type: p > 0, or ``math.inf``.

    Returns:
        A 0-d tensor on the gradients' device.
    """
    counted = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients.counted]
    if gradients.collectives is None and all(gradient.dtype in _WIDE for gradient in counted):
        return torch.nn.utils.get_total_norm(counted, norm_type).to(gradients.device)
    combined = partial_norm(norms_of(counted, norm_type, gradients.dtype), norm_type, gradients.device)
    if gradients.collectives is None:
        return total_norm(combined, norm_type, gradients.dtype)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    with marked("zero1_custom: agree on the norm of gradients"):
        gradients.collectives.all_reduce(combined, op=op).wait()
    return total_norm(combined, norm_type, gradients.dtype)


def norms_of(tensors: Iterable[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor with elements, summed in ``dtype``. Complex tensors count by their absolute values."""
    present = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors if tensor.numel()]
    return list(norm_all(present, norm_type, dtype=dtype)) if present else []


def partial_norm(norms: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """This rank's contribution to the norm of all gradients.

    Args:
        norms: Norms of the gradients that this rank owns, 0-d tensors. There may be none. They are summed in the same
            dtype on every rank.
        norm_type: p > 0, or ``math.inf``.
        device: The device of the result.

    Returns:
        1-D, to be combined over ranks. For a finite p, ``[sum |g|^p]`` in float64, since powers overflow sooner than
        norms. For infinity, ``[max |g|, whether any is NaN]``, since a maximum over ranks may skip a NaN. Without
        norms, zeros.
    """
    if not norms:
        return torch.zeros(2 if math.isinf(norm_type) else 1, dtype=torch.float64, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms]).double()
    if math.isinf(norm_type):
        # `posinf`: by default, infinity would become the largest finite number.
        return torch.stack([stacked.nan_to_num(nan=0.0, posinf=math.inf).max(), stacked.isnan().any().double()])
    return stacked.pow(norm_type).sum().reshape(1)


def total_norm(combined: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm over all ranks, from the sum (for infinity, the maximum) of their partial norms.

    Args:
        combined: 1-D, see :func:`partial_norm`.
        norm_type: The same p.
        dtype: The dtype of the result.

    Returns:
        A 0-d tensor. If any gradient is NaN, it is NaN.
    """
    if math.isinf(norm_type):
        return torch.where(combined[1] > 0, math.nan, combined[0]).to(dtype)
    return combined[0].pow(1.0 / norm_type).to(dtype)


@torch.no_grad()
def scale_to_norm(gradients: StepGradients, norm: Tensor, max_norm: float) -> Tensor:
    """Scales the gradients by the factor that brings ``norm`` down to ``max_norm``, at most by 1. Not collective.

    It is one pass over the gradients that this rank steps, as by ``torch.nn.utils.clip_grads_with_norm_``.

    Args:
        gradients: See :func:`step_gradients`.
        norm: A 0-d tensor, of these gradients or of more.
        max_norm: The largest norm allowed.

    Returns:
        The factor, a 0-d tensor.
    """
    # The 1e-6 is torch's: clipped gradients must equal those of `clip_grad_norm_`.
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients.stepped:
        multiply_all(gradients.stepped, coefficient)
    return coefficient


@torch.no_grad()
def clip_gradients_by_value(gradients: StepGradients, max_value: float) -> None:
    """Clamps every element to ``[-max_value, max_value]``, as ``torch.nn.utils.clip_grad_value_`` does. Not collective.

    Args:
        gradients: See :func:`step_gradients`.
        max_value: The largest absolute value allowed.
    """
    # torch clips the gradient of a tensor, not the tensor itself.
    owners = [gradient.detach() for gradient in gradients.stepped]
    for owner, gradient in zip(owners, gradients.stepped, strict=True):
        owner.grad = gradient
    if owners:
        torch.nn.utils.clip_grad_value_(owners, max_value)


def hidden_sharding(optimizer: Optimizer) -> OptimizerSharding | None:
    """The sharding that holds an optimizer's gradients, if only shards hold them.

    Exposed gradients are in ``param.grad`` on every rank. Users may change them, and the changed values count.
    """
    sharding: OptimizerSharding | None = vars(optimizer).get(SHARDING)
    return sharding if sharding is not None and sharding.attached and not sharding.exposes_gradients else None


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]
