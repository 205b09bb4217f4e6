"""Every implementation computes the same, leaves the rest alone, and sends what it says."""

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.distributed.comm.backends import LocalCollectives, NativeCollectives, make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives, Traffic
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from tests.accounting import step_traffic
from tests.pool import RankPool

SHARD = 5
KINDS_AND_WORLD_SIZES: list[tuple[type[Collectives], int]] = [
    # A rank that is alone has these, whatever the backend.
    (LocalCollectives, 1),
    *((kind, size) for kind in (NativeCollectives, PairwiseCollectives) for size in (2, 3)),
]


def contribution(rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    values = torch.arange(world_size * SHARD, dtype=torch.float32) + 100 * rank
    return (values * (1 + 0.5j) if dtype.is_complex else values).to(dtype)


def exchange(kind: type[Collectives], dtype: torch.dtype) -> tuple[Tensor, Tensor, Traffic]:
    group = process_groups().gradients
    rank, world_size = dist.get_rank(), dist.get_world_size()
    collectives = kind(group)
    shard = torch.full((SHARD,), -1.0).to(dtype)
    reduction = collectives.reduce_scatter(contribution(rank, world_size, dtype), shard)
    gathered = torch.zeros(world_size, SHARD, dtype=dtype)
    gathered[rank] = rank + 1
    gathering = collectives.all_gather(gathered.view(-1))
    gathering.wait()
    reduction.wait()
    return shard, gathered, collectives.traffic


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "world_size"), KINDS_AND_WORLD_SIZES)
def test_reduces_to_the_owner_and_gathers_in_place(
    pool: RankPool, kind: type[Collectives], world_size: int, dtype: torch.dtype
) -> None:
    total = sum(contribution(rank, world_size, dtype) for rank in range(world_size))
    expected_gather = torch.arange(1, world_size + 1).to(dtype)[:, None].expand(-1, SHARD)
    sent = (world_size - 1) * SHARD * dtype.itemsize
    for rank, (shard, gathered, traffic) in enumerate(pool.run(world_size, exchange, kind, dtype)):
        torch.testing.assert_close(shard, total.view(world_size, -1)[rank])
        assert torch.equal(gathered, expected_gather)
        count = int(world_size > 1)
        assert traffic == Traffic(count, sent, count, sent, 0)


PARTS: dict[int, list[tuple[int, ...]]] = {
    1: [(7,)],
    2: [(4, 6), (0, 10), (10, 0), (5, 5)],
    3: [(4, 3, 2), (5, 0, 4), (0, 0, 9), (0, 9, 0), (1, 1, 7)],
    4: [(1, 2, 3, 6), (4, 0, 8, 0), (0, 12, 0, 0), (0, 4, 1, 7)],
}
"""How long each rank's part of a buffer is, by world size; buffers of one length are summed alike, however cut."""


def random_contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(dtype) * (
        1 + 0.5j if dtype.is_complex else 1
    )


Make = Callable[[dist.ProcessGroup], Collectives]


def uneven(group: dist.ProcessGroup) -> Collectives:
    return UnevenCollectives(PairwiseCollectives(group))


def exchange_parts(make: Make, parts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Traffic]:
    collectives = make(process_groups().gradients)
    rank, bounds = dist.get_rank(), tuple(accumulate(parts, initial=0))
    shard = torch.full((parts[rank],), -1.0).to(dtype)
    reduction = collectives.reduce_scatter(random_contribution(rank, bounds[-1], dtype), shard, bounds)
    gathered = torch.zeros(bounds[-1], dtype=dtype)
    gathered[bounds[rank] : bounds[rank + 1]] = rank + 1
    gathering = collectives.all_gather(gathered, bounds)
    gathering.wait()
    reduction.wait()
    return shard, gathered, collectives.traffic


@pytest.mark.parametrize(
    ("make", "world_size", "dtype"),
    [
        (LocalCollectives, 1, torch.float32),
        (NativeCollectives, 2, torch.complex64),
        (NativeCollectives, 3, torch.float32),
        (PairwiseCollectives, 2, torch.float32),
        (uneven, 2, torch.float32),
        (uneven, 3, torch.bfloat16),
        (uneven, 3, torch.complex64),
        (PairwiseCollectives, 4, torch.float32),
        (uneven, 4, torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parts_may_differ_in_length_and_be_empty(
    pool: RankPool, make: Make, world_size: int, dtype: torch.dtype
) -> None:
    for parts in PARTS[world_size]:
        check_parts(pool, make, parts, dtype)


def check_parts(pool: RankPool, make: Make, parts: tuple[int, ...], dtype: torch.dtype) -> None:
    numel, world_size = sum(parts), len(parts)
    # In rank order, to the last bit, so that how the buffer is cut does not change the training.
    total = sum(random_contribution(rank, numel, dtype) for rank in range(world_size))
    assert isinstance(total, Tensor)
    expected_gather = torch.repeat_interleave(torch.arange(1, world_size + 1), torch.tensor(parts)).to(dtype)
    bounds = tuple(accumulate(parts, initial=0))
    layout = BucketLayout((), bounds, dtype.itemsize)
    for rank, (shard, gathered, traffic) in enumerate(pool.run(world_size, exchange_parts, make, parts, dtype)):
        # torch's own sums come in an order of their own.
        rounding = 4 * torch.finfo(dtype).eps if make is NativeCollectives else 0
        torch.testing.assert_close(shard, total[bounds[rank] : bounds[rank + 1]], rtol=rounding, atol=rounding)
        assert torch.equal(gathered, expected_gather)
        away, home = (numel - parts[rank]) * dtype.itemsize, (world_size - 1) * parts[rank] * dtype.itemsize
        straight = Traffic(int(world_size > 1), away, int(world_size > 1), home, 0)
        assert traffic == (straight if make is PairwiseCollectives else Traffic(*step_traffic([layout], rank)))


def reduce_into(make: Make, large: float, narrow: torch.dtype, wide: torch.dtype, differ: bool) -> Tensor:
    """Rank 0 contributes a number to which one cannot be added in the narrow dtype, the others one."""
    collectives = make(process_groups().gradients)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = parts_of_ranks(world_size, differ)
    shard = torch.full((parts[rank],), -1.0).to(wide)
    buffer = torch.full((sum(parts),), 1.0 if rank else large).to(narrow)
    bounds = tuple(accumulate(parts, initial=0)) if differ else None
    work = collectives.reduce_scatter(buffer, shard, bounds)
    work.wait()
    if make is PairwiseCollectives or not differ:
        assert collectives.traffic.reduce_scatter_bytes == (sum(parts) - parts[rank]) * narrow.itemsize
    else:
        sent, summed = (BucketLayout((), bounds or (), dtype.itemsize) for dtype in (narrow, wide))
        assert collectives.traffic.reduce_scatter_bytes == step_traffic([sent], rank, summed=[summed])[1]
    total = shard.clone()
    # Waiting again does not write again.
    shard.zero_()
    work.wait()
    assert not shard.any()
    return total


def parts_of_ranks(world_size: int, differ: bool) -> list[int]:
    return [SHARD + other * world_size if differ else SHARD for other in range(world_size)]


BF16 = (2.0**8, torch.bfloat16, torch.float32)
FP16 = (2.0**11, torch.float16, torch.float32)
FP32 = (2.0**24, torch.float32, torch.float64)
COMPLEX = (2.0**24, torch.complex64, torch.complex128)


@pytest.mark.parametrize("differ", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("make", "world_size", "large", "narrow", "wide"),
    [
        (LocalCollectives, 1, *BF16),
        (NativeCollectives, 2, *FP16),
        (NativeCollectives, 3, *BF16),
        (PairwiseCollectives, 2, *FP16),
        (uneven, 2, *COMPLEX),
        (uneven, 3, *BF16),
        (uneven, 3, *FP32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_narrow_buffers_are_summed_into_wider_shards(
    pool: RankPool, make: Make, world_size: int, large: float, narrow: torch.dtype, wide: torch.dtype, differ: bool
) -> None:
    assert (torch.tensor(large, dtype=narrow) + 1).item() == large
    for rank, shard in enumerate(pool.run(world_size, reduce_into, make, large, narrow, wide, differ)):
        expected = torch.full((parts_of_ranks(world_size, differ)[rank],), large + world_size - 1, dtype=wide)
        assert shard.dtype == wide
        torch.testing.assert_close(shard, expected, rtol=0, atol=0)


def many_under_way(differ: bool) -> list[float]:
    collectives = make_collectives(process_groups().gradients, torch.device("cpu"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [1000 + 102 * other if differ else 1000 for other in range(world_size)]
    bounds = tuple(accumulate(parts, initial=0)) if differ else None
    shards = [torch.empty(parts[rank]) for _ in range(20)]
    works = [
        collectives.reduce_scatter(torch.full((sum(parts),), float(index)), shard, bounds)
        for index, shard in enumerate(shards)
    ]
    # Waited for in another order than launched.
    for work in reversed(works):
        work.wait()
    return [shard.unique().item() for shard in shards]


@pytest.mark.parametrize("differ", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_reductions_under_way_do_not_mix(pool: RankPool, world_size: int, differ: bool) -> None:
    for results in pool.run(world_size, many_under_way, differ):
        assert results == [float(index * world_size) for index in range(20)]


def wait_for_a_rank_that_is_gone() -> tuple[list[str], float]:
    """What a rank is told that waits twice, and how long the second time takes."""
    collectives, launched = PairwiseCollectives(process_groups().gradients), torch.zeros(1)
    if dist.get_rank() == 2:
        for rank in range(2):
            dist.recv(launched, rank)
        del collectives
        dist.destroy_process_group()
        return [], 0.0
    gathering = collectives.all_gather(torch.zeros(3))
    dist.send(launched, 2)
    errors = []
    for _ in range(2):
        began = time.monotonic()
        try:
            gathering.wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors, time.monotonic() - began


def test_waiting_again_for_a_rank_that_is_gone_fails_at_once(own_pool: RankPool) -> None:
    for errors, seconds in own_pool.run(3, wait_for_a_rank_that_is_gone)[:2]:
        assert len(errors) == 2 and errors[0] in errors[1] and seconds < 5.0


def on_a_gpu() -> str:
    with pytest.raises(ValueError) as refused:
        make_collectives(process_groups().gradients, torch.device("cuda", 0))
    return str(refused.value)


def test_a_group_that_sends_from_the_host_is_refused_on_a_gpu(pool: RankPool) -> None:
    for message in pool.run(2, on_a_gpu):
        assert "process_group_backend='gloo'" in message and "`ddp`" in message


def groups_twice() -> tuple[bool, bool, str]:
    first, second = process_groups(), process_groups()
    separate = len({id(group) for group in first}) == 3
    return (
        all(one is other for one, other in zip(first, second, strict=True)),
        separate,
        dist.get_backend(first.control),
    )


def test_process_groups_are_separate_and_made_once(pool: RankPool) -> None:
    assert pool.run(2, groups_twice) == [(True, True, "gloo")] * 2


ENDS_WITH_A_COLLECTIVE = """
import sys
import torch
import torch.distributed as dist
from lightning_parstrat.distributed.comm.process_groups import process_groups

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
process_groups()
for _ in range(3):
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.ones(1))
del parts
"""


@pytest.mark.slow
def test_a_program_that_ends_right_after_a_collective_succeeds(tmp_path: Path) -> None:
    """Without our care about a fifth of such programs abort, so that a few tries show it."""
    script = tmp_path / "program.py"
    script.write_text(ENDS_WITH_A_COLLECTIVE)
    for attempt in range(4):
        arguments = [sys.executable, str(script), str(tmp_path / f"rendezvous-{attempt}")]
        ranks = [subprocess.Popen([*arguments, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
