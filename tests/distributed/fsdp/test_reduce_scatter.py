"""FSDP2's gradients by exchanged chunks are those by Gloo's reduce-scatter, for half of what is sent."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.fsdp.reduce_scatter import ExchangedReduceScatter
from tests.comparing import assert_same
from tests.pool import RankPool


def gradients(reduce_dtype: torch.dtype | None, exchanged: bool) -> tuple[list[Tensor], int]:
    """Of two backwards, and how many bytes were sent for them."""
    torch.manual_seed(0)
    # No number of ranks divides all of them.
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    group = process_groups().gradients
    collectives = make_collectives(group, torch.device("cpu"))
    precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for unit in (*module, module):
        sharded = fully_shard(unit, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=precision)
        if exchanged:
            sharded.set_custom_reduce_scatter(ExchangedReduceScatter(collectives))
    for _ in range(2):
        module(torch.randn(4, 5) * (1 + dist.get_rank())).square().sum().backward()
    whole = [parameter.grad.full_tensor() for parameter in module.parameters() if isinstance(parameter.grad, DTensor)]
    return whole, collectives.traffic.reduce_scatter_bytes


DTYPES = (None, torch.float64, torch.bfloat16)


def gradients_of_each(exchanged: bool) -> list[tuple[list[Tensor], int]]:
    return [gradients(dtype, exchanged) for dtype in DTYPES]


def test_gradients_are_the_same(pool: RankPool) -> None:
    expected, actual = (pool.run(3, gradients_of_each, exchanged) for exchanged in (False, True))
    padded = sum(-(-rows // 3) * columns for rows, columns in ((7, 5), (7, 1), (3, 7), (3, 1)))
    for ours, theirs in zip(actual, expected, strict=True):
        for dtype, (whole, sent), (reference, _) in zip(DTYPES, ours, theirs, strict=True):
            # bf16 is rounded after each addition, whose order differs.
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
            assert len(whole) == 4
            assert_same(whole, reference, rtol=tolerance, atol=tolerance)
            assert sent == 2 * 2 * padded * (dtype or torch.float32).itemsize
