"""Engines whose state is sharded within groups of ranks and copied between them."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.topology import Node
from lightning_parstrat.distributed.comm import backends
from lightning_parstrat.distributed.comm.backends import NativeCollectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.engine import engine as engines
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.comparing import assert_same, distance
from tests.distributed.engines import adafactor, adamw, backward, clip_gradients_by_norm, perceptron
from tests.pool import RankPool

OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor}
STEPS = 5


def make(optimizer: str, nodes: str, dtype: torch.dtype = torch.float32, **policy: Any) -> ShardedDataParallel:
    module = perceptron(dtype)
    chosen = ShardingPolicy(bucket_cap_mb=1e-3, **policy)
    made = [OPTIMIZERS[optimizer](module.parameters())]
    return ShardedDataParallel(module, made, chosen, process_groups(), Node(nodes[dist.get_rank()]))


def take_step(engine: ShardedDataParallel, number: int) -> None:
    (optimizer,) = engine.optimizers
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    inputs = torch.randn(4, 12, generator=generator).to(next(engine.module.parameters()).dtype)
    optimizer.zero_grad()
    backward(engine, engine.module(inputs).square().mean())
    clip_gradients_by_norm(optimizer, 0.1)
    optimizer.step()


def train(optimizer: str, nodes: str, native: bool = False, **policy: Any) -> tuple[list[Tensor], Any, Any]:
    """Parameters, the whole state, and what this rank holds of it beside the number of its shard."""
    instead = native_everywhere() if native else mock.MagicMock()
    with instead:
        engine = make(optimizer, nodes, **policy)
    if native:
        assert isinstance(engine.reducer.collectives, NativeCollectives)
    for number in range(STEPS):
        take_step(engine, number)
    engine.gatherer.finish()
    (trained,) = engine.optimizers
    whole = trained.state_dict()
    shards = [slot.shard for bucket in engine.buckets for slot in bucket.slots if slot.shard is not None]
    held = [[shard.detach().clone(), dict(trained.state[shard])] for shard in shards]
    parameters = [parameter.detach().clone() for parameter in engine.module.parameters()]
    place = engine.reducer.collectives.place
    engine.close()
    return parameters, whole, (place.shard, held)


def native_everywhere() -> Any:
    """Groups that GPUs would have, by Gloo."""

    def make_collectives(group: Any, device: torch.device, topology: Any = None, groups: Any = None) -> Any:
        if groups is None:
            return backends.make_collectives(group, device, topology)
        return NativeCollectives(group, groups, groups.rings_carry_more(topology))

    return mock.patch.object(engines, "make_collectives", make_collectives)


# What parity in groups has not: narrow wires, and groups that GPUs would have.
TRAININGS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("aabb", "node", "adamw", {"dtype": torch.bfloat16}),
    ("abba", 2, "adamw", {"comm_dtype": "bf16"}),
    ("aabb", 2, "adamw", {"gather_dtype": "bf16"}),
    ("aabb", 1, "adafactor", {}),
    ("aabb", "node", "adamw", {"native": True}),
    ("abba", "node", "adafactor", {"native": True}),
    ("aabb", 1, "adamw", {"native": True, "comm_dtype": "bf16"}),
    ("aabb", 2, "adamw", {"native": True, "comm_dtype": "bf16", "gather_dtype": "bf16"}),
    ("aabbcc", "node", "adafactor", {}),
    ("aaaaaa", 3, "adamw", {"comm_dtype": "bf16", "gather_dtype": "bf16"}),
]


@pytest.mark.parametrize(
    "trainings", [TRAININGS[:6], pytest.param(TRAININGS[6:], marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_trains_as_one_group_does_and_copies_stay_alike(pool: RankPool, trainings: Any) -> None:
    for nodes, shard_group, optimizer, policy in trainings:
        ranks = len(nodes)
        alone = partial(train, optimizer, nodes, **{**policy, "native": False})
        expected, expected_state, _ = pool.run(ranks, alone)[0]
        narrow = policy.keys() & {"comm_dtype", "gather_dtype", "dtype"}
        found = pool.run(ranks, partial(train, optimizer, nodes, **policy, shard_group=shard_group))
        by_shard: dict[int, Any] = {}
        for parameters, state, (shard, held) in found:
            assert distance(parameters, expected) <= (2e-2 if narrow else 1e-5)
            assert state.keys() == expected_state.keys() and state["state"].keys() == expected_state["state"].keys()
            # Nothing would bring copies together again.
            assert_same(parameters, found[0][0])
            assert_same(state, found[0][1])
            assert_same(held, by_shard.setdefault(shard, held))
        assert len(by_shard) == (ranks // len(set(nodes)) if shard_group == "node" else shard_group)
