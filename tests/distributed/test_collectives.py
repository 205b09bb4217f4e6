"""Every implementation computes the same, leaves the rest alone, and sends what it says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.collectives import (
    Collectives,
    LocalCollectives,
    NativeCollectives,
    PairwiseCollectives,
    Traffic,
    make_collectives,
    process_groups,
)
from tests.pool import RankPool

SHARD = 5


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        (LocalCollectives, 1),
        (NativeCollectives, 1),
        *((kind, size) for kind in (NativeCollectives, PairwiseCollectives) for size in (2, 3, 4)),
    ],
)
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


def many_under_way() -> list[float]:
    collectives = make_collectives(process_groups().gradients, torch.device("cpu"))
    assert isinstance(collectives, PairwiseCollectives)
    world_size = dist.get_world_size()
    shards = [torch.empty(1000) for _ in range(20)]
    works = [
        collectives.reduce_scatter(torch.full((1000 * world_size,), float(index)), shard)
        for index, shard in enumerate(shards)
    ]
    # Waited for in another order than launched.
    for work in reversed(works):
        work.wait()
    return [shard.unique().item() for shard in shards]


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_reductions_under_way_do_not_mix(pool: RankPool, world_size: int) -> None:
    for results in pool.run(world_size, many_under_way):
        assert results == [float(index * world_size) for index in range(20)]


def groups_twice() -> tuple[bool, bool, str]:
    first, second = process_groups(), process_groups()
    separate = len({id(group) for group in first}) == 3
    return first is second, separate, dist.get_backend(first.control)


def test_process_groups_are_separate_and_made_once(pool: RankPool) -> None:
    assert pool.run(2, groups_twice) == [(True, True, "gloo")] * 2


ENDS_WITH_A_COLLECTIVE = """
import sys
import torch
import torch.distributed as dist
from lightning_parstrat.distributed.collectives import process_groups

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
process_groups()
for _ in range(3):
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.ones(1))
del parts
"""


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
