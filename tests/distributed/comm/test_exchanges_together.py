"""Many exchanges of even and uneven parts under way at once, by every way that CPU ranks go: right, and as counted."""

import os
import random
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core import halving
from lightning_parstrat.core.layout import BucketLayout, even_bounds
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import ProcessGroups, process_groups
from tests.accounting import step_traffic
from tests.pool import RankPool
from tests.slow import slow_unless

EXCHANGES = 12

WAYS: list[tuple[int, Any, int, int]] = [
    (4, "all", 4, 32),
    (4, 2, 4, 32),
    (4, 1, 4, 32),
    (6, "all", 3, 32),
    (6, 3, 6, 32),
    (6, 2, 3, 32),
    (6, "node", 2, 32),
    (6, "all", 6, 4),
    (6, "all", 3, 4),
    (6, "all", 2, 4),
]
"""Ranks, who shares a copy, ranks of a node, and up to how many ranks exchange by pairs."""


def some_bounds(draw: random.Random, parts: int, largest: int) -> range | tuple[int, ...]:
    numel = parts * draw.randint(1, largest)
    if draw.random() < 0.5:
        return even_bounds(numel, parts)
    return (0, *sorted(draw.randint(0, numel) for _ in range(parts - 1)), numel)


def integers(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small, so that sums are exact in whatever order and dtype."""
    return torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def exchange(
    groups: ProcessGroups, seed: int, choice: Any, on_node: int, dtype: torch.dtype, wide: torch.dtype
) -> tuple[list[bool], Any]:
    """Whether each came to what it should; and what was sent, beside what should be."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    draw, of_rank = random.Random(seed), random.Random(1000 * seed + rank)
    topology = Topology.of([other // on_node for other in range(world_size)])
    sharing = ShardGroups.chosen(choice, topology)
    by_gradients, by_parameters = (
        make_collectives(group, torch.device("cpu"), topology, sharing)
        for group in (groups.gradients, groups.parameters)
    )
    by_gradients.connect(torch.device("cpu"))
    by_parameters.connect(torch.device("cpu"), reduces=False)
    bounds_of = [some_bounds(draw, sharing.size, 300 if number % 5 else 60_000) for number in range(EXCHANGES)]
    under_way = []
    for number, bounds in enumerate(bounds_of):
        start, stop = bounds[by_gradients.place.shard], bounds[by_gradients.place.shard + 1]
        given = [integers(1000 * number + other, bounds[-1], dtype) for other in range(world_size)]
        shard, total = torch.empty(stop - start, dtype=wide), torch.stack([one.to(wide) for one in given]).sum(0)
        expected, gathered = integers(number, bounds[-1], wide), torch.full((bounds[-1],), 99, dtype=wide)
        gathered[start:stop] = expected[start:stop]
        reduction = by_gradients.reduce_scatter(given[rank], shard, bounds)
        under_way.append((reduction, shard, total[start:stop]))
        under_way.append((by_parameters.all_gather(gathered, bounds), gathered, expected))
        if of_rank.random() < 0.3:
            reduction.is_completed()
    # In another order on every rank.
    of_rank.shuffle(under_way)
    right = []
    for work, found, expected in under_way:
        work.wait()
        work.wait()
        right.append(torch.equal(found, expected))
    narrow_plan = [BucketLayout((), bounds, dtype.itemsize) for bounds in bounds_of]
    plan = [BucketLayout((), bounds, wide.itemsize) for bounds in bounds_of]
    formula = step_traffic(narrow_plan, rank, topology, plan, plan, sharing)
    sent = by_gradients.traffic + by_parameters.traffic
    return right, ({name: getattr(sent, name) for name in formula._fields}, formula._asdict())


def exchange_by(most_by_pairs: int, *arguments: Any) -> tuple[list[bool], Any]:
    with mock.patch.object(halving, "MOST_BY_PAIRS", most_by_pairs):
        return exchange(process_groups(), *arguments)


def exchange_on_demand(most_by_pairs: int, number: int, *arguments: Any) -> tuple[list[bool], Any]:
    """As in a large world: ranks are connected when they first have something to say to each other."""
    with mock.patch.object(halving, "MOST_BY_PAIRS", most_by_pairs):
        with mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
            # No other test has groups of this timeout.
            groups = process_groups(timedelta(seconds=70 + number))
        return exchange(groups, *arguments)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.complex64, torch.complex64)],
    ids=str,
)
@pytest.mark.parametrize(
    ("ranks", "choice", "on_node", "most_by_pairs"),
    slow_unless(lambda *way: way in ((4, 2, 4, 32), (6, 2, 3, 32), (6, "all", 3, 4)), WAYS),
)
def test_what_is_under_way_together_keeps_apart(
    pool: RankPool, ranks: int, choice: Any, on_node: int, most_by_pairs: int, dtype: torch.dtype, wide: torch.dtype
) -> None:
    for seed in range(2):
        for right, (sent, expected) in pool.run(ranks, exchange_by, most_by_pairs, seed, choice, on_node, dtype, wide):
            assert len(right) == 2 * EXCHANGES and all(right)
            assert sent == expected


@pytest.mark.parametrize(
    "number", slow_unless(lambda number: WAYS[number] in ((6, 2, 3, 32), (6, "all", 3, 4)), list(range(len(WAYS))))
)
def test_ranks_that_connect_on_demand_do_not_wait_for_each_other(pool: RankPool, number: int) -> None:
    ranks, choice, on_node, most_by_pairs = WAYS[number]
    asked = (most_by_pairs, number, 1, choice, on_node, torch.float32, torch.float32)
    for right, (sent, expected) in pool.run(ranks, exchange_on_demand, *asked):
        assert len(right) == 2 * EXCHANGES and all(right)
        assert sent == expected
