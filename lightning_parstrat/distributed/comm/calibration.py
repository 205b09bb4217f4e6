"""Measures collectives on the live process group while nothing computes."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.cost_model import AlphaBeta, fit_alpha_beta
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages

_SIZES = tuple(4**power for power in range(7, 14))
"""16 KiB to 64 MiB."""

_SIZES_FITTED = 5
_LONG_ENOUGH = 5e-3
_REPETITIONS = 3


def reduce_scatter_cost(
    collectives: Collectives, control: Collectives, device: torch.device, model_bytes: int
) -> AlphaBeta:
    """Latency and seconds per byte of large reduce-scatters on the slowest rank. Collective.

    Sizes grow until one takes some milliseconds: on a slow wire some 20 MB are sent, on a fast one some 250. What NCCL
    sends in small messages travels by another protocol, of less latency and a fraction of the bandwidth, and says
    nothing of buckets. Nothing computes meanwhile, so this is what the wire can do, not what is left of it during a
    backward that shares the processor.

    Args:
        collectives: To be measured; none of its collectives may be in flight.
        control: Its group works on host memory.
        device: Device of the gradients.
        model_bytes: What is reduced in a step; nothing larger is sent.
    """

    def buffer_of(nbytes: int) -> Tensor:
        return torch.zeros(-(-nbytes // 4 // collectives.shard_count) * collectives.shard_count, device=device)

    def reduce_scatter(buffer: Tensor) -> None:
        shard = torch.empty(buffer.numel() // collectives.shard_count, device=device)
        collectives.reduce_scatter(buffer, shard).wait()

    buffers: list[Tensor] = []
    for size in _SIZES:
        if len(buffers) >= _SIZES_FITTED and size > model_bytes:
            break
        buffers = [*buffers[1 - _SIZES_FITTED :], buffer_of(size)]
        # The first of a size opens connections and allocates.
        slowest = max(_seconds_on_slowest(reduce_scatter, [buffers[-1]] * 2, control)[1:])
        if len(buffers) == _SIZES_FITTED and slowest > _LONG_ENOUGH:
            break
    return _cost(reduce_scatter, buffers, [buffer.nbytes for buffer in buffers], control)


def _cost(
    collective: Callable[[Tensor], object], buffers: Sequence[Tensor], nbytes: Sequence[int], control: Collectives
) -> AlphaBeta:
    # Round by round, not size by size: a disturbance then hits all sizes alike. Once more at first, which connects.
    order = [0, *list(range(len(buffers))) * _REPETITIONS]
    slowest = _seconds_on_slowest(collective, [buffers[index] for index in order], control)
    return fit_alpha_beta(zip((nbytes[index] for index in order[1:]), slowest[1:], strict=True))


def _seconds_on_slowest(
    collective: Callable[[Tensor], object], buffers: Sequence[Tensor], control: Collectives
) -> list[float]:
    """How long each takes. The maximum over ranks: a collective is as slow as its slowest rank, and all must know."""
    messages, taken = ControlMessages(control), []
    for buffer in buffers:
        # A barrier: without it, the time that others wait for a late rank would count as the wire's. Not a ring's,
        # which lets one rank go half a round before the next.
        messages.launch().wait()
        began = time.perf_counter()
        collective(buffer)
        if buffer.device.type == "cuda":
            # On CUDA, `wait` only makes the stream wait.
            torch.cuda.synchronize(buffer.device)
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(taken, dtype=torch.float64)
    control.all_reduce(slowest, op=dist.ReduceOp.MAX).wait()
    seconds: list[float] = slowest.tolist()
    return seconds
