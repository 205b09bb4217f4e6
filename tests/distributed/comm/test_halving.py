"""Rounds between many ranks come to what pairs do, whatever nodes there are, and to the same on all ranks."""

from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core import halving
from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.topology import Node, Topology
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.halving import HalvingCollectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.accounting import step_traffic, traffic_of
from tests.comparing import distance
from tests.pool import RankPool

CPU = torch.device("cpu")
IN_ROUNDS = mock.patch.multiple(halving, MOST_BY_PAIRS=1, LARGEST_ROUND=3)
"""Within it six ranks are many, and need two rounds."""
EVEN = (4,) * 6
UNEVEN = (1, 2, 3, 3, 0, 9)


def in_rounds(keys: str) -> Collectives:
    with IN_ROUNDS:
        collectives = make_collectives(process_groups().gradients, CPU, Topology.of(keys))
    assert isinstance(collectives, UnevenCollectives) and isinstance(collectives.even, HalvingCollectives)
    assert len(collectives.even._rounds) > 1
    return collectives


def contribution(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    # Small integers: sums are exact in whatever order.
    values = torch.randint(-20, 20, (numel,), generator=generator).to(dtype)
    return values * (1 + 0.5j) if dtype.is_complex else values


def bounds_of(parts: tuple[int, ...]) -> range | tuple[int, ...]:
    bounds = tuple(accumulate(parts, initial=0))
    return range(0, bounds[-1] + 1, parts[0]) if len(set(parts)) == 1 else bounds


def exchange(keys: str, parts: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype) -> list[bool]:
    collectives, rank, bounds = in_rounds(keys), dist.get_rank(), bounds_of(parts)
    # Several at once, waited for in another order: none may receive another's chunks.
    shards = [torch.full((parts[rank],), -1.0).to(wide) for _ in range(4)]
    gathered = [torch.zeros(bounds[-1], dtype=dtype) for _ in range(4)]
    works = []
    for number, (shard, buffer) in enumerate(zip(shards, gathered, strict=True)):
        buffer[bounds[rank] : bounds[rank + 1]] = 10 * number + rank
        given = contribution(rank, bounds[-1], dtype, number)
        works += [collectives.reduce_scatter(given, shard, bounds), collectives.all_gather(buffer, bounds)]
    for work in reversed(works):
        work.wait()
    right = [work.is_completed() for work in works]
    of_all = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    for number, (shard, buffer) in enumerate(zip(shards, gathered, strict=True)):
        total = sum(contribution(other, bounds[-1], dtype, number) for other in range(len(parts)))
        assert isinstance(total, Tensor)
        right.append(torch.equal(shard, total[bounds[rank] : bounds[rank + 1]].to(wide)))
        right.append(torch.equal(buffer, (of_all + 10 * number).to(dtype)))
    layout = BucketLayout((), bounds, dtype.itemsize)
    with IN_ROUNDS:
        formula = step_traffic([layout], rank, Topology.of(keys), None, [layout._replace(itemsize=wide.itemsize)])
    sent = collectives.traffic
    right.append(sent.reduce_scatter_bytes == 4 * formula.reduce_scatter_bytes)
    right.append(sent.all_gather_bytes == 4 * formula.all_gather_bytes)
    right.append(sent.between_nodes_bytes == 4 * formula.between_nodes_bytes)
    return right


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.complex64, torch.complex64)],
    ids=str,
)
@pytest.mark.parametrize("parts", [EVEN, UNEVEN, (0, 18, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("keys", ["aaaaaa", "aabbcc", "abcabc", "aaabbb", "aaaabb"])
def test_reduces_to_the_owner_and_gathers_in_place(
    pool: RankPool, keys: str, parts: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype
) -> None:
    for right in pool.run(6, exchange, keys, parts, dtype, wide):
        assert right and all(right)


def reduce_into_wider(keys: str) -> float:
    buffer = torch.full((6,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    shard = torch.empty(1)
    in_rounds(keys).reduce_scatter(buffer, shard).wait()
    return shard.item()


def test_sums_travel_in_the_wider_dtype_but_a_nodes_to_other_nodes(pool: RankPool) -> None:
    # To 256, bfloat16 cannot add one.
    assert pool.run(6, reduce_into_wider, "aaaaaa") == [261.0] * 6
    # The first node has 258, which the second node's ranks get exactly, and 257 of 256 and one is rounded to 256.
    assert pool.run(6, reduce_into_wider, "aaabbb") == [261.0] * 6
    assert pool.run(6, reduce_into_wider, "aabbcc") == [261.0, 261.0, 260.0, 260.0, 260.0, 260.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def trained(nodes: str, kind: type[Collectives] | None = None, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    module, rank = Net(), dist.get_rank()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    engine = ShardedDataParallel(
        module, [optimizer], ShardingPolicy(bucket_cap_mb=1e-4), process_groups(), Node(nodes[rank])
    )
    if kind is not None:
        for collectives in (engine.reducer.collectives, engine.gatherer.collectives):
            assert isinstance(collectives, UnevenCollectives) and type(collectives.even) is kind
    for step in range(steps):
        inputs = torch.randn(len(nodes), 7, generator=torch.Generator().manual_seed(step))[rank : rank + 1]
        loss = module(inputs).square().mean()
        engine.prepare_backward(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.gatherer.finish()
    assert len(engine.buckets) > 2
    formula, traffic = traffic_of(engine), engine.traffic
    assert (traffic.reduce_scatter_bytes, traffic.all_gather_bytes, traffic.between_nodes_bytes) == (
        steps * formula.reduce_scatter_bytes,
        steps * formula.all_gather_bytes,
        steps * formula.between_nodes_bytes,
    )
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    engine.close()
    return parameters


def trained_in_rounds(nodes: str) -> list[Tensor]:
    with IN_ROUNDS:
        return trained(nodes, HalvingCollectives)


@pytest.mark.parametrize("nodes", ["aaaaaa", "ababab"])
def test_a_training_in_rounds_is_that_by_pairs_up_to_rounding(pool: RankPool, nodes: str) -> None:
    expected = pool.run(6, trained, "aaaaaa")
    found = pool.run(6, trained_in_rounds, nodes)
    for parameters in found:
        torch.testing.assert_close(parameters, expected[0], rtol=1e-5, atol=1e-6)
        assert distance(parameters, found[0]) == 0
