"""Unequal parts: the same sums as from everybody to the owner, in memory that does not grow with the ranks."""

import gc
import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.backends import NativeCollectives, make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives, sizes_by_rank
from lightning_parstrat.distributed.comm.work import Work
from tests.pool import RankPool

CPU = torch.device("cpu")


def contribution(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def straight_and_passed_on(parts: tuple[int, ...], narrow: torch.dtype) -> list[bool]:
    """Whether sums are, to the last bit, those that go from everybody to the owner."""
    group, rank = process_groups().gradients, dist.get_rank()
    bounds = tuple(accumulate(parts, initial=0))
    made = []
    for collectives in (PairwiseCollectives(group), make_collectives(group, CPU)):
        shard = torch.empty(parts[rank])
        collectives.reduce_scatter(contribution(rank, bounds[-1]).to(narrow), shard, bounds).wait()
        flat = torch.zeros(bounds[-1])
        flat[bounds[rank] : bounds[rank + 1]] = shard
        collectives.all_gather(flat, bounds).wait()
        made.append((shard, flat))
    return [torch.equal(one, other) for one, other in zip(*made, strict=True)]


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [(4, 6), (0, 10), (9, 0, 0), (3, 0, 9), (1, 2, 3, 6), (0, 0, 12, 0)], ids=str)
def test_sums_are_those_of_a_straight_way_to_the_owner(
    pool: RankPool, parts: tuple[int, ...], narrow: torch.dtype
) -> None:
    assert pool.run(len(parts), straight_and_passed_on, parts, narrow) == [[True, True]] * len(parts)


def mixed_under_way(kind: str, seed: int) -> list[bool]:
    """Equal and unequal parts, out and home, on one group, launched at different times on each rank."""
    group, rank, size = process_groups().gradients, dist.get_rank(), dist.get_world_size()
    collectives: Collectives
    if kind == "two levels":
        collectives = make_collectives(group, CPU, Topology.of("aabb"))
    else:
        collectives = make_collectives(group, CPU) if kind == "pairs" else NativeCollectives(group)
    pause, same = random.Random(100 * seed + rank), random.Random(seed)
    under_way: list[tuple[Work, Tensor, Tensor]] = []
    for number in range(16):
        numel = size * same.randint(1, 40)
        cuts = sorted(same.randint(0, numel) for _ in range(size - 1))
        bounds: Sequence[int] | None = (0, *cuts, numel) if same.random() < 0.6 else None
        at = bounds or range(0, numel + 1, numel // size)
        own = slice(at[rank], at[rank + 1])
        if same.random() < 0.5:
            values = [torch.arange(numel) % 7 + 10.0 * number + other for other in range(size)]
            shard = torch.empty(own.stop - own.start)
            total = torch.stack(values).sum(0)[own]
            under_way.append((collectives.reduce_scatter(values[rank], shard, bounds), shard, total))
        else:
            expected = torch.arange(numel) + 1000.0 * number
            flat = torch.full((numel,), -1.0)
            flat[own] = expected[own]
            under_way.append((collectives.all_gather(flat, bounds), flat, expected))
        time.sleep(pause.choice((0.0, 0.0, 0.003)))
    right = []
    for work, found, expected in under_way:
        work.wait()
        right.append(torch.equal(found, expected) and (kind == "native" or work.is_completed()))
    return right


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "ranks"), [("pairs", 2), ("pairs", 3), ("native", 3), ("two levels", 4)])
def test_what_is_under_way_on_one_group_keeps_apart(pool: RankPool, kind: str, ranks: int, seed: int) -> None:
    assert pool.run(ranks, mixed_under_way, kind, seed) == [[True] * 16] * ranks


class _Watched(UnevenCollectives):
    """Notes what it is asked to receive."""

    def __init__(self, even: PairwiseCollectives) -> None:
        super().__init__(even)
        self.passed_on: list[int] = []

    def _pass_on(self, source: Any, had: Sequence[int], target: Any, wanted: Sequence[int], tag: int) -> Work:
        rank = self.rank
        mine = max(0, min(had[rank + 1], wanted[rank + 1]) - max(had[rank], wanted[rank]))
        self.passed_on.append(wanted[rank + 1] - wanted[rank] - mine)
        return super()._pass_on(source, had, target, wanted, tag)


def received_beside_a_bucket(parts: tuple[int, ...]) -> list[int]:
    collectives = _Watched(PairwiseCollectives(process_groups().gradients))
    rank, bounds = dist.get_rank(), tuple(accumulate(parts, initial=0))
    collectives.reduce_scatter(torch.ones(bounds[-1]), torch.empty(parts[rank]), bounds).wait()
    collectives.all_gather(torch.ones(bounds[-1]), bounds).wait()
    return collectives.passed_on


def test_a_rank_receives_its_own_part_once_not_once_from_each(pool: RankPool) -> None:
    parts = (0, 16, 0, 0)
    # Of 16 elements each sums up four.
    assert pool.run(4, received_beside_a_bucket, parts) == [[0, 4], [12, 0], [0, 4], [0, 4]]


def wait_for_a_rank_that_is_gone() -> bool:
    """Whether this rank is told that another is gone, or that a third one has ended for that reason."""
    rank, bounds, launched = dist.get_rank(), (0, 9, 9, 9), torch.zeros(1)
    collectives = make_collectives(process_groups().gradients, CPU)
    if rank == 2:
        for other in range(2):
            dist.recv(launched, other)
        del collectives
        dist.destroy_process_group()
        return True
    work = collectives.reduce_scatter(torch.zeros(9), torch.empty(bounds[rank + 1] - bounds[rank]), bounds)
    dist.send(launched, 2)
    try:
        work.wait()
    except RuntimeError:
        # As a training does that ends by it; what the exception refers to holds connections.
        del collectives, work
        dist.destroy_process_group()
        gc.collect()
        return True
    return False


def test_a_rank_that_is_gone_fails_what_waits_for_it(own_pool: RankPool) -> None:
    assert own_pool.run(3, wait_for_a_rank_that_is_gone) == [True] * 3


def test_sizes_of_an_all_to_all() -> None:
    assert sizes_by_rank((0, 4, 4, 10), 2, 9) == [2, 0, 5]
    assert sizes_by_rank((0, 4, 4, 10), 4, 4) == [0, 0, 0]
    assert sizes_by_rank(range(0, 13, 3), 3, 7) == [0, 3, 1, 0]
