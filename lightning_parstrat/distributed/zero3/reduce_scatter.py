"""Between CPUs FSDP2 sums gradients as the other strategies do: Gloo's own reduce-scatter is an all-reduce."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives


class ExchangedReduceScatter:
    """What FSDP2 calls in the place of a process group's reduce-scatter (``FSDPModule.set_custom_reduce_scatter``).

    Each rank of N sends (N - 1) / N of a unit's gradients, where an all-reduce sends twice as much.

    Args:
        collectives: Of all ranks that share the parameters.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and for what comes of it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Leaves this rank's part of the sum, or of the mean, in ``output_tensor``. Collective; waits for it."""
        self._collectives.reduce_scatter(input_tensor, output_tensor).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self._collectives.shard_count)
