"""What a reduce-scatter takes on the live process group."""

import time

import torch
import torch.distributed as dist

from lightning_parstrat.core.cost_model import CostFit, fit_alpha_beta
from lightning_parstrat.distributed.collectives import Collectives

_SIZES = (2**14, 2**16, 2**18, 2**20, 2**22)
_REPETITIONS = 3


def reduce_scatter_cost(collectives: Collectives, control: Collectives, device: torch.device) -> CostFit:
    """Latency and seconds per byte of a reduce-scatter, the slowest rank's. Collective; sends some 20 MB.

    Nothing computes meanwhile, so that it is what the wire can do, not what is left of it beside a backward that shares
    the processor.

    Args:
        collectives: To be measured; nothing is under way.
        control: Works on host memory.
        device: Where the gradients are.
    """
    taken: list[tuple[int, float]] = []
    for nbytes in (_SIZES[0], *_SIZES * _REPETITIONS):
        per_rank = -(-nbytes // 4 // collectives.world_size)
        buffer = torch.zeros(per_rank * collectives.world_size, device=device)
        shard = torch.empty(per_rank, device=device)
        control.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        collectives.reduce_scatter(buffer, shard).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((buffer.nbytes, time.perf_counter() - began))
    # The first one opens connections.
    slowest = torch.tensor([seconds for _, seconds in taken[1:]], dtype=torch.float64)
    control.all_reduce(slowest, op=dist.ReduceOp.MAX).wait()
    return fit_alpha_beta(zip((nbytes for nbytes, _ in taken[1:]), slowest.tolist(), strict=True))
