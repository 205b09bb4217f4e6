"""The mean of long vectors over ranks, sent in fewer bits than it is computed in.

Each of K ranks sums one of K pieces in the dtype of the values, and sends the mean of its piece to all others. So a
rank sends 2 (K - 1) / K of a vector, each value once rounded and each mean once. The result has the same bits on all
ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.policy import OuterDtype
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import Steps

BLOCK = 256
"""Values that share a scale in 8 bits. The scale adds 4 bytes to 256."""


def mean_over_ranks(values: Tensor, sums: Collectives, gathers: Collectives, sent_in: OuterDtype) -> Steps:
    """The steps of a mean over ranks, for :class:`Exchange`. They return it: 1-D, in the dtype of ``values``.

    Collective. Launch several in the same order on all ranks.

    Args:
        values: 1-D, floating point, as long on all ranks.
        sums: Collectives of the ranks, for the first step.
        gathers: Those of another process group, as another thread may launch the second step.
        sent_in: ``"int8"`` sends a fourth of the bytes of fp32, ``"bf16"`` half, None the dtype of ``values``.
    """
    ranks, rank, numel = sums.world_size, sums.rank, values.numel()
    # A rank may own no element of a bucket.
    if ranks == 1 or not numel:
        return values
    unit = ranks * (BLOCK if sent_in == "int8" else 1)
    padded = values.new_zeros(-(-numel // unit) * unit)
    padded[:numel] = values
    pieces = padded.view(ranks, -1)
    # In either case this rank's mean is rounded, too, so that all ranks have the same bits.
    if sent_in == "int8":
        packed = quantized(pieces)
        received = torch.empty_like(packed)
        sums.count(packed.nbytes - packed[0].nbytes)
        yield dist.all_to_all_single(received, packed, group=sums.group, async_op=True)
        packed[rank] = quantized(dequantized(received).mean(0, keepdim=True))[0]
        yield gathers.all_gather(packed.view(-1))
        return dequantized(packed).view(-1)[:numel].to(values.dtype)
    buffer = pieces.to(torch.bfloat16) if sent_in == "bf16" else pieces
    own = values.new_empty(pieces.shape[1])
    yield sums.reduce_scatter(buffer.view(-1), own)
    buffer[rank] = own.div_(ranks)
    yield gathers.all_gather(buffer.view(-1))
    return buffer.view(-1)[:numel].to(values.dtype)


def quantized(values: Tensor) -> Tensor:
    """Values in 8 bits. Each block of 256 is divided by its scale, 1/127 of its largest magnitude, and rounded.

    A block that has NaN or infinity becomes NaN.

    Args:
        values: 2-D. The length of a row is a multiple of 256.

    Returns:
        2-D, int8. A row has the values, then the bytes of the scales in fp32.
    """
    blocks = values.float().view(len(values), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).div_(127)
    codes = blocks.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes.flatten(1), scales.flatten(1).view(torch.int8)], 1)


def dequantized(packed: Tensor) -> Tensor:
    """The values of :func:`quantized`: 2-D, fp32."""
    values = packed.shape[1] // (BLOCK + 4) * BLOCK
    scales = packed[:, values:].contiguous().view(torch.float32)
    codes = packed[:, :values].reshape(len(packed), -1, BLOCK)
    return torch.mul(codes, scales.unsqueeze(2)).flatten(1)
