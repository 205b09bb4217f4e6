"""Exchange in two levels computes what flat exchange does, and sends less between nodes."""

import random
import time
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.topology import Node, Topology
from lightning_parstrat.distributed.comm.agreement import topology_of_ranks
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.two_level import TwoLevelCollectives
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.accounting import step_traffic
from tests.comparing import distance
from tests.pool import RankPool

CPU = torch.device("cpu")
RANKS = 4
EQUAL = (5, 5, 5, 5)


def contribution(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randint(-50, 50, (numel,), generator=generator)
    return values.to(dtype) * (1 + 0.5j) if dtype.is_complex else values.to(dtype)


def exchange(keys: str, parts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    collectives = make_collectives(process_groups().gradients, CPU, Topology.of(keys))
    assert isinstance(collectives, UnevenCollectives)
    rank, bounds = dist.get_rank(), tuple(accumulate(parts, initial=0))
    shard = torch.full((parts[rank],), -1.0).to(dtype)
    reduction = collectives.reduce_scatter(contribution(rank, bounds[-1], dtype), shard, bounds)
    gathered = torch.zeros(bounds[-1], dtype=dtype)
    gathered[bounds[rank] : bounds[rank + 1]] = rank + 1
    # On one group and not waited for: the two must not receive each other's pieces.
    collectives.all_gather(gathered, bounds).wait()
    reduction.wait()
    assert reduction.is_completed()
    return shard, gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("parts", [EQUAL, (1, 2, 3, 6), (0, 12, 0, 0), (0, 0, 0, 8)], ids=str)
@pytest.mark.parametrize("keys", ["aabb", "abab", "abba"])
def test_reduces_to_the_owner_and_gathers_in_place(
    pool: RankPool, keys: str, parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    # Small integers: sums are exact in whatever order.
    total = sum(contribution(rank, sum(parts), dtype) for rank in range(RANKS))
    assert isinstance(total, Tensor)
    bounds = list(accumulate(parts, initial=0))
    expected_gather = torch.repeat_interleave(torch.arange(1, RANKS + 1), torch.tensor(parts)).to(dtype)
    for rank, (shard, gathered) in enumerate(pool.run(RANKS, exchange, keys, parts, dtype)):
        assert torch.equal(shard, total[bounds[rank] : bounds[rank + 1]])
        assert torch.equal(gathered, expected_gather)


def reduce_into_wider(keys: str) -> Tensor:
    collectives = make_collectives(process_groups().gradients, CPU, Topology.of(keys))
    buffer = torch.full((RANKS,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    shard = torch.empty(1)
    collectives.reduce_scatter(buffer, shard).wait()
    return shard


def test_sums_of_a_node_are_made_in_the_wider_dtype_and_travel_in_the_narrow_one(pool: RankPool) -> None:
    # On rank 0's node 256 + 1, which its counterparts and itself keep; bfloat16 rounds it to 256 on the way.
    shards = pool.run(RANKS, reduce_into_wider, "aabb")
    assert [shard.item() for shard in shards] == [259.0, 259.0, 258.0, 258.0]


def many_at_once(seed: int) -> list[bool]:
    gradients = make_collectives(process_groups().gradients, CPU, Topology.of("aabb"))
    parameters = make_collectives(process_groups().parameters, CPU, Topology.of("aabb"))
    rank, pause = dist.get_rank(), random.Random(100 * seed + dist.get_rank())
    reductions, gathers = [], []
    for number in range(20):
        numel = 4 * (1 + 37 * number % 11)
        shard = torch.empty(numel // 4)
        reductions.append((gradients.reduce_scatter(contribution(rank, numel, torch.float32, number), shard), shard))
        gathered = torch.zeros(numel)
        gathered.view(4, -1)[rank] = 10 * number + rank
        gathers.append((parameters.all_gather(gathered), gathered))
        time.sleep(pause.choice((0.0, 0.0, 0.003)))
    right = []
    for number, ((reduction, shard), (gather, gathered)) in enumerate(zip(reductions, gathers, strict=True)):
        reduction.wait()
        gather.wait()
        total = sum(contribution(other, 4 * len(shard), torch.float32, number) for other in range(RANKS))
        right.append(torch.equal(shard, total.view(4, -1)[rank]))
        right.append(gathered.view(4, -1)[:, 0].tolist() == [10 * number + other for other in range(RANKS)])
    return right


@pytest.mark.parametrize("seed", range(3))
def test_many_exchanges_under_way_keep_apart(pool: RankPool, seed: int) -> None:
    assert all(all(right) for right in pool.run(RANKS, many_at_once, seed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def trained(node_of: str, steps: int = 4) -> tuple[list[Tensor], bool, bool]:
    """Parameters after some steps, and whether what was sent is what the formulas say."""
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    rank = dist.get_rank()
    policy = ShardingPolicy(bucket_cap_mb=1e-4)
    engine = ShardedDataParallel(module, [optimizer], policy, process_groups(), Node(node_of[rank]))
    for step in range(steps):
        inputs = torch.randn(RANKS, 7, generator=torch.Generator().manual_seed(step))[rank : rank + 1]
        loss = module(inputs).square().mean()
        engine.prepare_backward(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.gatherer.finish()
    sent, home = engine.reducer.collectives.traffic, engine.gatherer.collectives.traffic
    formula = step_traffic([bucket.layout for bucket in engine.buckets], rank, engine.topology)
    all_bytes = (sent.reduce_scatter_bytes, home.all_gather_bytes) == (
        steps * formula.reduce_scatter_bytes,
        steps * formula.all_gather_bytes,
    )
    between = sent.between_nodes_bytes + home.between_nodes_bytes == steps * formula.between_nodes_bytes
    assert isinstance(engine.reducer.collectives, UnevenCollectives)
    two_levels = isinstance(engine.reducer.collectives.even, TwoLevelCollectives)
    assert two_levels == engine.topology.has_two_levels and len(engine.buckets) > 2
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    engine.close()
    return parameters, all_bytes, between


def test_a_training_in_two_levels_is_that_of_flat_exchange(pool: RankPool) -> None:
    flat = pool.run(RANKS, trained, "aaaa")
    uneven = pool.run(RANKS, trained, "aaab")
    two_level = pool.run(RANKS, trained, "abab")
    for (expected, *_), (of_uneven, *counts), (parameters, *right) in zip(flat, uneven, two_level, strict=True):
        assert all(counts) and all(right)
        assert distance(of_uneven, expected) == 0
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        assert distance(parameters, two_level[0][0]) == 0


def nodes_by_rank(names: str, numbers: str) -> tuple[Topology, int]:
    """Who shares a node, and how many small reductions it took to know."""
    rank, control = dist.get_rank(), make_collectives(process_groups().control, CPU)
    found = topology_of_ranks(Node(names[rank], int(numbers[rank])), control)
    return found, control.traffic.small_reductions


PLACED = {
    "one node": ("aaaa", "0000", (0, 0, 0, 0), 2),
    "in order": ("aabb", "0011", (0, 0, 1, 1), 2),
    "each its own": ("abcd", "0123", (0, 1, 2, 3), 2),
    "of one name": ("aaaa", "0011", (0, 0, 1, 1), 2),
    "without numbers": ("aabb", "0000", (0, 0, 1, 1), 3),
    "without numbers, one another": ("aaab", "0000", (0, 0, 0, 1), 3),
    "by turns": ("abab", "0101", (0, 1, 0, 1), 3),
    "by turns, without numbers": ("abab", "0000", (0, 1, 0, 1), 3),
    "as it comes": ("baab", "1001", (0, 1, 1, 0), 3),
    "against their order": ("bbaa", "1100", (0, 0, 1, 1), 3),
    "unequal": ("aaab", "0001", (0, 0, 0, 1), 3),
    "of several names": ("abcc", "0011", (0, 1, 2, 2), 3),
    "names crosswise": ("abab", "0011", (0, 1, 2, 3), 3),
    "numbers that begin at 1": ("aabb", "1122", (0, 0, 1, 1), 3),
    "more numbers than ranks": ("aabb", "0099", (0, 0, 1, 1), 3),
    "of three, unequal": ("aab", "001", (0, 0, 1), 3),
    "of five, each its own": ("abcde", "01234", (0, 1, 2, 3, 4), 2),
}


@pytest.mark.parametrize(("names", "numbers", "nodes", "reductions"), PLACED.values(), ids=PLACED)
def test_ranks_agree_on_who_shares_a_node(
    pool: RankPool, names: str, numbers: str, nodes: tuple[int, ...], reductions: int
) -> None:
    expected = (Topology(nodes), reductions)
    assert pool.run(len(names), nodes_by_rank, names, numbers) == [expected] * len(names)


def test_what_an_exchange_raises_reaches_whoever_waits() -> None:
    thread, failed, after = ExchangeThread("test"), ExchangedWork(), ExchangedWork()

    def fail() -> None:
        raise OSError("connection closed by peer")

    thread.run(failed, fail)
    thread.run(after, after.finish)
    after.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="between ranks failed: connection closed by peer"):
            failed.wait()


def test_world_size_one_and_single_ranks_per_node_need_no_levels(pool: RankPool) -> None:
    assert pool.run(2, kind_of, "ab") == [PairwiseCollectives] * 2


def kind_of(keys: str) -> type:
    collectives = make_collectives(process_groups().gradients, CPU, Topology.of(keys))
    return type(collectives.even) if isinstance(collectives, UnevenCollectives) else type(collectives)
