"""When forward needs the parameters that are on their way, and which of them go home together."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero1 import replanning
from lightning_parstrat.distributed.zero1.clocks import NeedClock, group_gathers
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.comparing import distance
from tests.pool import RankPool

LAYERS = 8
STEPS = 9


class Slow(nn.Module):
    """Takes a while from layer to layer, so that the last ones are needed late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            time.sleep(0.002)
            inputs = torch.tanh(layer(inputs))
        return inputs


def sharding_of(optimizer: Any) -> Any:
    return optimizer._sharding


def train(**policy: Any) -> tuple[list[Tensor], list[int | None], list[int]]:
    """Parameters after each step, the group of each bucket on its way home, and the parts of the last steps."""
    torch.manual_seed(0)
    module = Slow()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.03)
    planned = {"bucket_cap_mb": 8.0, **policy}
    engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(**planned), process_groups())
    parameters, parts = [], []
    for step in range(STEPS):
        engine.prepare_forward()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = module(torch.randn(5, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        engine.prepare_backward(loss)
        loss.backward()
        engine.reducer.finish(engine.buckets)
        parts.append(len(sharding_of(optimizer)._parts(optimizer)))
        optimizer.step()
        parameters += [parameter.detach().clone() for parameter in module.parameters()]
    groups = [bucket.gather_group for bucket in reversed(engine.buckets)]
    engine.close()
    return parameters, groups, parts


def train_both_ways(cost: AlphaBeta) -> tuple[bool, list[int | None], list[int]]:
    kept = replanning._SMALLEST_WORTH_TIMING, replanning.reduce_scatter_cost
    replanning._SMALLEST_WORTH_TIMING = 0
    replanning.reduce_scatter_cost = lambda *_: SimpleNamespace(model=cost)
    try:
        actual, groups, parts = train(bucket_cap_mb="auto")
    finally:
        replanning._SMALLEST_WORTH_TIMING, replanning.reduce_scatter_cost = kept
    expected, ungrouped, _ = train()
    assert all(group is None for group in ungrouped)
    return distance(actual, expected) == 0, groups, parts


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_that_are_needed_early_go_home_alone(pool: RankPool, world_size: int) -> None:
    # 1 KB a layer: as long on the wire as a layer computes, and latency that two layers can pay together.
    cost = AlphaBeta(latency_seconds=1e-3, seconds_per_byte=1e-6)
    for same, groups, parts in pool.run(world_size, train_both_ways, cost):
        assert same
        assert None not in groups and groups == sorted(groups)
        # One bucket at first; then as planned, and from the fifth step on what is sent together is stepped together.
        assert parts[0] == 1 and parts[-1] == len(set(groups))


def test_on_a_wire_without_bandwidth_limits_all_go_together(pool: RankPool) -> None:
    for same, groups, parts in pool.run(2, train_both_ways, AlphaBeta(latency_seconds=1.0, seconds_per_byte=0.0)):
        assert same and set(groups) == {0} and parts[-1] == 1


class Bucket:
    """As much of a bucket as is asked for."""

    gather_dtype = torch.float32
    gather_group: int | None = None

    def __init__(self, nbytes: int) -> None:
        self.layout = SimpleNamespace(numel=nbytes // 4)


@pytest.mark.parametrize(
    ("latency", "needed", "groups"),
    [
        (0.0, [0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3]),
        (5.0, [0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]),
        (1.0, [2.0, 100.0, 100.0, 100.0], [0, 1, 1, 1]),
    ],
)
def test_groups_by_hand(latency: float, needed: list[float], groups: list[int]) -> None:
    buckets: list[Any] = [Bucket(4) for _ in needed]
    group_gathers(buckets, needed, AlphaBeta(latency_seconds=latency, seconds_per_byte=0.25))
    assert [one.gather_group for one in buckets] == groups


def needs() -> list[float]:
    buckets: list[Any] = [Bucket(4) for _ in range(3)]
    first, second, _ = buckets
    clock = NeedClock()
    assert not clock.has_begun
    clock.need(first)
    clock.send(first)
    assert clock.has_begun
    time.sleep(0.02 * (dist.get_rank() + 1))
    clock.need(first)
    # What is waited for delays all that follows, but not when it was needed.
    time.sleep(0.3)
    clock.wait(0.3)
    clock.need(second)
    clock.need(first)
    return clock.agree(buckets, make_collectives(process_groups().control, torch.device("cpu")))


def test_the_earliest_rank_says_when_a_bucket_is_needed(pool: RankPool) -> None:
    found = pool.run(2, needs)
    assert found[0] == found[1]
    first, second, third = found[0]
    assert 0.02 <= first <= second < first + 0.3 and third == 0.0
