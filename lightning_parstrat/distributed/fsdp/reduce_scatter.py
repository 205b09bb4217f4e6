"""How gradients of sharded parameters are summed over ranks: in fp32, in whatever dtype they are sent."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives


class ExchangedReduceScatter:
    """FSDP2 calls it instead of a process group's reduce-scatter (``FSDPModule.set_custom_reduce_scatter``).

    Between CPUs, each rank of N sends (N - 1) / N of a unit's gradients. Gloo's own reduce-scatter sends twice as much.

    Args:
        collectives: Sum the gradients of all ranks, those of other copies included.
        travels_in: The dtype to which gradients are rounded before they are sent. None sends them unchanged. They are
            summed in their own dtype. Rounding needs two more buffers of the unit's gradients in this dtype.
        before: Called with gradients before they are sent. It raises if other ranks do not send theirs.
    """

    def __init__(
        self, collectives: Collectives, travels_in: torch.dtype | None, before: Callable[[Tensor], None]
    ) -> None:
        self._collectives = collectives
        self._travels_in = travels_in
        self._before = before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients that are sent, and for their sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Leaves this rank's part of the sum, or of the mean, in ``output_tensor``. Collective. It waits."""
        self._before(input_tensor)
        sent = input_tensor if self._travels_in is None else input_tensor.to(self._travels_in)
        self._collectives.reduce_scatter(sent, output_tensor).wait()
        # FSDP2 knows of the ranks of one copy.
        divisor = self._collectives.place.copies * (self._collectives.shard_count if op == dist.ReduceOp.AVG else 1)
        if divisor > 1:
            output_tensor.div_(divisor)

    def sum_over_copies(self, gradients: Tensor) -> None:
        """The mean over copies, in place, if a copy has one rank. FSDP2 then reduces nothing by itself. Collective."""
        if gradients.is_cuda:
            # FSDP2 allocates them on another stream than that of this call, and may free them before it has ended.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))
        self(gradients, gradients.clone(), self._collectives.group, dist.ReduceOp.SUM)
