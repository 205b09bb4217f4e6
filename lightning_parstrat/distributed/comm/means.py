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

BLOCK = 256
"""Values that share a scale in 8 bits. The scale adds 4 bytes to 256."""


def mean_over_ranks(values: Tensor, collectives: Collectives, sent_in: OuterDtype) -> Tensor:
    """The mean of ``values`` over ranks. Collective, and the host waits.

    Args:
        values: 1-D, floating point, as long on all ranks.
        collectives: Those of the ranks.
        sent_in: ``"int8"`` sends a fourth of the bytes of fp32, ``"bf16"`` half, None the dtype of ``values``.

    Returns:
        1-D, the dtype of ``values``.
    """
    ranks, numel = collectives.world_size, values.numel()
    if ranks == 1:
        return values
    unit = ranks * (BLOCK if sent_in == "int8" else 1)
    padded = values.new_zeros(-(-numel // unit) * unit)
    padded[:numel] = values
    if sent_in == "int8":
        return _mean_in_8_bits(padded, collectives)[:numel]
    buffer = padded.to(torch.bfloat16) if sent_in == "bf16" else padded
    own = padded.new_empty(padded.numel() // ranks)
    collectives.wait(collectives.reduce_scatter(buffer, own))
    # Also this rank's mean is rounded, so that all ranks have the same bits.
    buffer.view(ranks, -1)[collectives.rank] = own.div_(ranks)
    collectives.wait(collectives.all_gather(buffer))
    return buffer[:numel].to(values.dtype)


def _mean_in_8_bits(padded: Tensor, collectives: Collectives) -> Tensor:
    packed = quantized(padded.view(collectives.world_size, -1))
    received = torch.empty_like(packed)
    collectives.count(packed.nbytes - packed[0].nbytes)
    work = dist.all_to_all_single(received, packed, group=collectives.group, async_op=True)
    collectives.wait(work)
    packed[collectives.rank] = quantized(dequantized(received).mean(0, keepdim=True))[0]
    collectives.wait(collectives.all_gather(packed.flatten()))
    return dequantized(packed).flatten().to(padded.dtype)


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
