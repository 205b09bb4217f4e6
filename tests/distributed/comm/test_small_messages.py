"""Small tensors that hosts put together: what comes of it is the same on all ranks, to the last bit."""

import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives, small_reductions_of
from lightning_parstrat.distributed.comm.doubling import meetings
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.comparing import assert_same
from tests.pool import RankPool

VALUES = [
    (dtype, shape) for dtype in (torch.int32, torch.int64, torch.float32, torch.float64) for shape in ((), (3,), (2, 5))
]


@pytest.mark.parametrize("world_sizes", [range(1, 40), (47, 64, 96, 100), (512, 1000, 1024)], ids=str)
def test_all_ranks_hear_each_rank_once_and_in_the_same_order(world_sizes: Iterable[int]) -> None:
    for size in world_sizes:
        met, known = [meetings(rank, size) for rank in range(size)], [[rank] for rank in range(size)]
        left = [list(of_rank) for of_rank in met]
        while any(left):
            # A rank meets another when both have come to it. What is sent is what was known before.
            heard = {}
            for rank, of_rank in enumerate(left):
                if of_rank and of_rank[0].receives:
                    (peer, sends, _), *_ = of_rank
                    if left[peer] and left[peer][0] == (rank, True, sends):
                        lower, higher = known[min(rank, peer)], known[max(rank, peer)]
                        heard[rank] = lower if rank > peer and not sends else [*lower, *higher]
            assert heard, "ranks wait for each other in a circle"
            senders = {left[rank][0].peer for rank in heard}
            for rank in heard.keys() | senders:
                left[rank].pop(0)
            known = [heard.get(rank, what) for rank, what in enumerate(known)]
        assert sorted(known[0]) == list(range(size)) and all(what == known[0] for what in known)
        # A rank sends at most log2(N) messages, and one more to a rank beyond the largest power of two.
        most = max(sum(one.sends for one in of_rank) for of_rank in met)
        assert most == int(math.log2(size)) + (not math.log2(size).is_integer())


def control() -> Collectives:
    return make_collectives(process_groups().control, torch.device("cpu"))


def values_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(dtype)


def reduced() -> tuple[list[tuple[Tensor, Tensor]], list[float], int, int]:
    """Sums and maxima; those of NaNs that one rank has; and how many reductions were counted, by whom."""
    collectives, rank, size = control(), dist.get_rank(), dist.get_world_size()
    before, under_way = small_reductions_of(collectives.group), []
    for dtype, shape in VALUES:
        total, largest = values_of(rank, dtype, shape), values_of(rank, dtype, shape)
        under_way.append((collectives.all_reduce(total), total))
        under_way.append((collectives.all_reduce(largest, op=dist.ReduceOp.MAX), largest))
    for culprit in range(size):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            value = torch.tensor(math.nan if rank == culprit else float(rank))
            under_way.append((collectives.all_reduce(value, op=op), value))
    # Where nothing has to be sent on, who waits may do so in any order.
    for work, _ in under_way[::-1] if rank == 0 and size == 2 else under_way:
        work.wait()
        work.wait()
        assert work.is_completed()
    found = [value for _, value in under_way]
    numbers, of_nan = found[: 2 * len(VALUES)], found[2 * len(VALUES) :]
    counted = (collectives.traffic.small_reductions, small_reductions_of(collectives.group) - before)
    return list(zip(numbers[::2], numbers[1::2], strict=True)), [float(one) for one in of_nan], *counted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_sums_and_maxima_are_those_of_all_ranks(pool: RankPool, world_size: int) -> None:
    by_rank = pool.run(world_size, reduced)
    reductions = 2 * (len(VALUES) + world_size) if world_size > 1 else 0
    for numbers, of_nan, *counted in by_rank:
        for (dtype, shape), (total, largest) in zip(VALUES, numbers, strict=True):
            stacked = torch.stack([values_of(rank, dtype, shape) for rank in range(world_size)])
            torch.testing.assert_close(total, stacked.sum(0, dtype=dtype), rtol=1e-6, atol=1e-3)
            assert torch.equal(largest, stacked.amax(0))
        assert_same(numbers, by_rank[0][0])
        assert len(of_nan) == 2 * world_size and all(map(math.isnan, of_nan))
        assert counted == [reductions, reductions]
