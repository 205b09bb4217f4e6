"""Small tensors that are put together in rounds: what comes of it is the same on all ranks, to the last bit."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives, small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.pool import RankPool

DTYPES = [torch.int32, torch.int64, torch.float32, torch.float64]


def control() -> Collectives:
    return make_collectives(process_groups().control, torch.device("cpu"))


def values_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(dtype)


def reduced(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    collectives, found = control(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        values = values_of(dist.get_rank(), dtype, shape)
        work = collectives.all_reduce(values, op=op)
        work.wait()
        # Waiting again adds nothing.
        work.wait()
        assert work.is_completed()
        found.append(values)
    return found


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_sums_and_maxima_are_those_of_all_ranks(
    pool: RankPool, world_size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    stacked = torch.stack([values_of(rank, dtype, shape) for rank in range(world_size)])
    by_rank = pool.run(world_size, reduced, dtype, shape)
    for total, largest in by_rank:
        torch.testing.assert_close(total, stacked.sum(0, dtype=dtype), rtol=1e-6, atol=1e-3)
        assert torch.equal(largest, stacked.amax(0))
        assert torch.equal(total, by_rank[0][0])


def with_nan(culprit: int) -> list[float]:
    mine = torch.tensor(math.nan if dist.get_rank() == culprit else float(dist.get_rank()))
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        values = mine.clone()
        control().all_reduce(values, op=op).wait()
        found.append(float(values))
    return found


@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (5, 4), (5, 0)])
def test_a_nan_of_one_rank_reaches_all(pool: RankPool, world_size: int, culprit: int) -> None:
    for found in pool.run(world_size, with_nan, culprit):
        assert len(found) == 2 and all(map(math.isnan, found))


def several_at_once() -> list[int]:
    """Launched one after the other, and waited for in another order on one of the ranks."""
    rank, collectives = dist.get_rank(), control()
    values = [torch.tensor(10 * number + rank) for number in range(4)]
    works = [collectives.all_reduce(value, op=dist.ReduceOp.MAX) for value in values]
    for work in works[::-1] if rank == 0 and dist.get_world_size() <= 4 else works:
        work.wait()
    return [int(value) for value in values]


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_several_are_not_mixed_up(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, several_at_once) == [[10 * n + world_size - 1 for n in range(4)]] * world_size


def counted() -> tuple[int, int]:
    collectives = control()
    before = small_reductions_of(collectives.group)
    for _ in range(3):
        collectives.all_reduce(torch.zeros(2)).wait()
    return collectives.traffic.small_reductions, small_reductions_of(collectives.group) - before


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_are_counted_for_the_group_and_for_whoever_launched_them(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, counted) == [(3 * (world_size > 1),) * 2] * world_size
