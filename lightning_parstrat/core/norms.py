"""Gradient norms over shards: a partial result per rank, its combination, and the factor that clips.

For the p-norm, every rank contributes ``sum |g|^p`` of the gradients that it owns. For the maximum norm it contributes
``max |g|``. The sum (the maximum) over ranks gives the norm of all gradients, since exactly one rank owns each element.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def partial_norm(norms: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """This rank's contribution to the norm of all gradients.

    Args:
        norms: Norms of the gradients that this rank owns, 0-d tensors. There may be none. Sum them in the same dtype on
            every rank, see :func:`accumulation_dtype`.
        norm_type: p > 0, or ``math.inf``.
        device: The device of the result.

    Returns:
        1-D, to be combined over ranks. For a finite p, ``[sum |g|^p]`` in float64, since powers overflow sooner than
        norms. For infinity, ``[max |g|, whether any is NaN]``, since a maximum over ranks may skip a NaN. Without
        norms, zeros.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"Invalid norm_type: {norm_type}. Must be > 0, or inf.")
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


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of this norm, at most 1."""
    # The 1e-6 is torch's: clipped gradients must equal those of `clip_grad_norm_`.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def accumulation_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which squares are summed: 16-bit sums overflow.

    If any gradient has 64-bit components it is float64, otherwise float32.
    """
    return torch.float64 if {torch.float64, torch.complex128} & set(dtypes) else torch.float32
