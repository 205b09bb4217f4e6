"""Collectives of shard groups sum over all ranks, to the same bits on all that hold a shard, and send what they say."""

from itertools import accumulate, pairwise
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm import backends
from lightning_parstrat.distributed.comm.collectives import Collectives, Traffic
from lightning_parstrat.distributed.comm.grouped import GroupedExchange
from lightning_parstrat.distributed.comm.process_groups import process_groups, subgroup
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from tests.accounting import step_traffic
from tests.pool import RankPool

CPU = torch.device("cpu")
Kind = Literal["exchange", "native"]
GROUPINGS: list[tuple[Any, str]] = [(2, "aaaa"), (1, "abab"), ("node", "abba"), (2, "aaabbb"), ("node", "ababab")]
"""A choice, and the node of every rank."""


def make(kind: Kind, choice: Any, keys: str) -> Collectives:
    """As on CPUs, or as on GPUs by Gloo."""
    group, topology = process_groups().gradients, Topology.of(keys)
    groups = ShardGroups.chosen(choice, topology)
    if kind == "exchange":
        made = backends.make_collectives(group, CPU, topology, groups)
        assert isinstance(made, UnevenCollectives) and isinstance(made.even, GroupedExchange)
        return made
    return backends._grouped_native(group, CPU, topology, groups)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return (values * (1 + 0.5j) if dtype.is_complex else values).to(dtype)


def exchange(
    kind: Kind, choice: Any, keys: str, parts: tuple[int, ...], dtype: torch.dtype, even: bool
) -> tuple[Tensor, Tensor, Traffic]:
    collectives = make(kind, choice, keys)
    collectives.connect(CPU)
    place, bounds = collectives.place, tuple(accumulate(parts, initial=0))
    shards = [torch.full((parts[place.shard],), -1.0).to(dtype) for _ in range(3)]
    buffer = contribution(dist.get_rank(), bounds[-1], dtype)
    reductions = [
        collectives.reduce_scatter((number + 1) * buffer, shard, None if even else bounds)
        for number, shard in enumerate(shards)
    ]
    gathered = torch.zeros(bounds[-1], dtype=dtype)
    gathered[bounds[place.shard] : bounds[place.shard + 1]] = 10 * place.copy + place.shard + 1
    # Not waited for in the order of their launch: none may receive what was meant for another.
    collectives.all_gather(gathered, None if even else bounds).wait()
    for reduction in reversed(reductions):
        reduction.wait()
    assert all(reduction.is_completed() for reduction in reductions)
    for number, shard in enumerate(shards):
        torch.testing.assert_close(shard, (number + 1) * shards[0], rtol=1e-5, atol=1e-5)
    return shards[0], gathered, collectives.traffic


def shapes(size: int) -> list[tuple[tuple[int, ...], bool]]:
    uneven = [(8, 0, 4)[:size], (0, 2, 13)[:size]]
    return [((5,) * size, True), *((parts, False) for parts in uneven if any(parts))]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("exchange", torch.float32), ("exchange", torch.complex64), ("native", torch.float32)], ids=str
)
@pytest.mark.parametrize(("choice", "keys"), GROUPINGS, ids=str)
def test_sums_over_all_ranks_and_gathers_within_the_group(
    pool: RankPool, kind: Kind, dtype: torch.dtype, choice: Any, keys: str
) -> None:
    groups, topology = ShardGroups.chosen(choice, Topology.of(keys)), Topology.of(keys)
    for parts, even in shapes(groups.size):
        bounds = tuple(accumulate(parts, initial=0))
        total = sum(contribution(rank, bounds[-1], dtype) for rank in range(len(keys)))
        assert isinstance(total, Tensor)
        layout = BucketLayout((), bounds, dtype.itemsize)
        found = pool.run(len(keys), exchange, kind, choice, keys, parts, dtype, even)
        for rank, (shard, gathered, traffic) in enumerate(found):
            place = groups.place(rank)
            start, stop = list(pairwise(bounds))[place.shard]
            torch.testing.assert_close(shard, total[start:stop], rtol=1e-5, atol=1e-5)
            # To the last bit: what is stepped by it must stay the same in all groups.
            assert torch.equal(shard, found[groups.holders(rank)[0]][0])
            values = torch.arange(1, groups.size + 1) + 10 * place.copy
            assert torch.equal(gathered, torch.repeat_interleave(values, torch.tensor(parts)).to(dtype))
            expected = step_traffic([layout], rank, topology, shard_groups=groups, native=kind == "native")
            assert traffic.reduce_scatters == 3 * expected.reduce_scatters == 3 * traffic.all_gathers
            assert traffic.reduce_scatter_bytes == 3 * expected.reduce_scatter_bytes
            assert traffic.all_gather_bytes == expected.all_gather_bytes
            assert traffic.all_reduces == 3 * expected.all_reduces == 3
            assert traffic.all_reduce_bytes == 3 * expected.all_reduce_bytes


def all_the_traffic(choice: Any, keys: str) -> tuple[Traffic, Any]:
    collectives = make("exchange", choice, keys)
    layout = BucketLayout((), range(0, 12 * collectives.shard_count + 1, 12), 4)
    buffer = torch.ones(layout.numel)
    collectives.reduce_scatter(buffer, torch.empty(12)).wait()
    collectives.all_gather(buffer).wait()
    expected = step_traffic([layout], dist.get_rank(), collectives.topology, shard_groups=collectives.shard_groups)
    return collectives.traffic, expected


@pytest.mark.parametrize(("choice", "keys"), GROUPINGS, ids=str)
def test_what_is_sent_between_nodes_is_counted(pool: RankPool, choice: Any, keys: str) -> None:
    for traffic, expected in pool.run(len(keys), all_the_traffic, choice, keys):
        assert {name: getattr(traffic, name) for name in expected._fields} == expected._asdict()


def reduce_into_wider(kind: Kind) -> Tensor:
    """Rank 0 contributes a number to which one cannot be added in the narrow dtype, the others one."""
    collectives = make(kind, 2, "aaaa")
    buffer = torch.full((6,), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
    shard = torch.empty(3)
    collectives.reduce_scatter(buffer, shard).wait()
    return shard


def test_sums_are_made_and_travel_between_groups_in_the_shards_dtype(pool: RankPool) -> None:
    for shard in pool.run(4, reduce_into_wider, "exchange"):
        assert torch.equal(shard, torch.full((3,), 259.0))


def groups_made_twice() -> tuple[int, bool]:
    gradients = process_groups().gradients
    mates = [0, 1] if dist.get_rank() < 2 else [2, 3]
    made = subgroup(gradients, mates)
    others = subgroup(process_groups().parameters, mates)
    return made.size(), made is subgroup(gradients, mates[::-1]) and made is not others


def test_a_group_of_some_ranks_is_made_once_for_each_purpose(pool: RankPool) -> None:
    assert pool.run(4, groups_made_twice) == [(2, True)] * 4


def widened() -> tuple[Tensor, Traffic]:
    collectives = backends.WideningCollectives(process_groups().gradients)
    buffer = torch.full((6,), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
    shard = torch.empty(2)
    collectives.reduce_scatter(buffer, shard).wait()
    return shard, collectives.traffic


def test_around_a_ring_gradients_travel_in_the_dtype_of_their_sum(pool: RankPool) -> None:
    for shard, traffic in pool.run(3, widened):
        assert torch.equal(shard, torch.full((2,), 258.0))
        assert traffic.reduce_scatter_bytes == 4 * 4


@pytest.mark.parametrize(
    ("nodes", "a_node", "choice", "widens"),
    [(8, 8, "all", True), (8, 8, 32, True), (8, 8, "node", False), (1, 8, "all", False), (64, 1, "all", False)],
)
def test_gradients_in_16_bits_are_widened_where_rings_cross_nodes_of_several_gpus(
    nodes: int, a_node: int, choice: Any, widens: bool
) -> None:
    topology = Topology.of([node for node in range(nodes) for _ in range(a_node)])
    groups = ShardGroups.chosen(choice, topology)
    assert backends._native(groups, topology).widens is widens
    assert backends._native(groups, None).widens is False
