"""Measures collectives on the live process group while nothing computes."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.cost_model import CostFit, fit_alpha_beta
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages

_SIZES = (2**14, 2**16, 2**18, 2**20, 2**22)
_REPETITIONS = 3


def reduce_scatter_cost(collectives: Collectives, control: Collectives, device: torch.device) -> CostFit:
    """Latency and seconds per byte of a reduce-scatter on the slowest rank. Collective; sends some 20 MB.

    Nothing computes meanwhile, so this is what the wire can do, not what is left of it during a backward that shares
    the processor.

    Args:
        collectives: To be measured; none of its collectives may be in flight.
        control: Its group works on host memory.
        device: Device of the gradients.
    """
    per_rank = [-(-nbytes // 4 // collectives.world_size) for nbytes in _SIZES]
    buffers = [torch.zeros(numel * collectives.world_size, device=device) for numel in per_rank]

    def reduce_scatter(buffer: Tensor) -> None:
        shard = torch.empty(buffer.numel() // collectives.world_size, device=device)
        collectives.reduce_scatter(buffer, shard).wait()

    return _cost(reduce_scatter, buffers, [buffer.nbytes for buffer in buffers], control)


def all_reduce_buffers(
    device: torch.device, gradient_dtype: torch.dtype, wire_dtype: torch.dtype, gradient_bytes: int
) -> dict[int, Tensor]:
    """The buffers that :func:`all_reduce_cost` sends, by their bytes. Not collective; some 20 MB at most.

    Args:
        device: Device of the gradients.
        gradient_dtype: Dtype of the gradients; bytes are counted in it.
        wire_dtype: Dtype in which they travel.
        gradient_bytes: Bytes of a step's gradients; no buffer is larger.
    """
    largest = min(max(gradient_bytes, 2**16), 2**24)
    # A logarithmic grid: the small sizes determine the latency, the large ones the bandwidth.
    sizes = {largest, largest // 4, largest // 16, largest // 64, min(2**14, largest // 128)}
    return {
        nbytes: torch.zeros(nbytes // gradient_dtype.itemsize, device=device, dtype=wire_dtype)
        for nbytes in sorted(sizes)
    }


def all_reduce_cost(group: dist.ProcessGroup, control: Collectives, buffers: Mapping[int, Tensor]) -> CostFit:
    """Latency and seconds per byte of an all-reduce on the slowest rank. Collective.

    Sends up to four times the bytes of a step, and at most some 80 MB.

    Args:
        group: To be measured; none of its collectives may be in flight.
        control: Its group works on host memory.
        buffers: What is sent, by its bytes; see :func:`all_reduce_buffers`.
    """
    return _cost(lambda buffer: group.allreduce([buffer]).wait(), list(buffers.values()), list(buffers), control)


def _cost(
    collective: Callable[[Tensor], object], buffers: Sequence[Tensor], nbytes: Sequence[int], control: Collectives
) -> CostFit:
    taken: list[tuple[int, float]] = []
    messages = ControlMessages(control)
    first = (buffers[0], nbytes[0])
    # Round by round, not size by size: a disturbance then hits all sizes alike.
    for buffer, size in (first, *list(zip(buffers, nbytes, strict=True)) * _REPETITIONS):
        # A barrier: without it, the time that others wait for a late rank would count as the wire's. Not a ring's,
        # which lets one rank go half a round before the next: the maximum below would add that to every size.
        messages.launch().wait()
        began = time.perf_counter()
        collective(buffer)
        if buffer.device.type == "cuda":
            # On CUDA, `wait` only makes the stream wait.
            torch.cuda.synchronize(buffer.device)
        taken.append((size, time.perf_counter() - began))
    # Not the first, which opens connections. The maximum: a collective is as slow as its slowest rank, and all ranks
    # must fit the same times to come to the same plan.
    slowest = torch.tensor([seconds for _, seconds in taken[1:]], dtype=torch.float64)
    control.all_reduce(slowest, op=dist.ReduceOp.MAX).wait()
    return fit_alpha_beta(zip((size for size, _ in taken[1:]), slowest.tolist(), strict=True))
