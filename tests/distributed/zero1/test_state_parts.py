"""What ranks tell each other of their state before it is saved, and how it comes to one of them."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parstrat.distributed.zero1 import state_messages, state_parts
from lightning_parstrat.distributed.zero1.optimizer_sharding import sharding_of
from lightning_parstrat.distributed.zero1.state_dict import gather_state_dict
from tests.comparing import assert_same
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

WIDTH = 48


def train(wrap: bool, change: Callable[[Any], None]) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = make_engine(module, optimizer, bucket_cap_mb=1e-2) if wrap else None
    for _ in range(2):
        loss = module(torch.ones(2, WIDTH)).pow(2).mean()
        if engine is None:
            loss.backward()
        else:
            backward(engine, loss)
        optimizer.step()
        optimizer.zero_grad()
    change(optimizer)
    return module, optimizer, engine


def first(optimizer: Any, number: int) -> Any:
    return optimizer.param_groups[0]["params"][number]


def alike(optimizer: Any) -> None:
    """All parameters have the same entries, and have made as many steps."""


def steps_differ(optimizer: Any) -> None:
    for number in (1, 4):
        state = optimizer.state.get(first(optimizer, number))
        if state:
            state["step"] += 5


def one_without(optimizer: Any) -> None:
    optimizer.state.pop(first(optimizer, 2), None)


def nested(optimizer: Any) -> None:
    state = optimizer.state.get(first(optimizer, 0))
    if state:
        state["kept"] = {"numbers": [torch.arange(3.0), 7], "word": "as it was"}


CHANGES = {change.__name__: change for change in (alike, steps_differ, one_without, nested)}


def gathered(change: str, destination: int | None) -> Any:
    _, optimizer, _ = train(True, CHANGES[change])
    told: list[Any] = []
    packed = [0]
    send, recv = state_parts.send_object, state_messages._places

    def count_places(*args: Any) -> Any:
        packed[0] += 1
        return recv(*args)

    with (
        mock.patch.object(state_parts, "send_object", lambda *args: (told.append(args), send(*args))),
        mock.patch.object(state_messages, "_places", count_places),
    ):
        found = gather_state_dict(optimizer, destination)
    buckets = len(sharding_of(optimizer).buckets)
    assert packed[0] == buckets * (dist.get_world_size() if dist.get_rank() == (destination or 0) else 1)
    return found, len(told)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_the_state_of_one_process(pool: RankPool, world_size: int, change: str) -> None:
    _, single, _ = train(False, CHANGES[change])
    results = pool.run(world_size, gathered, change, 0)
    state = results[0][0]
    assert_same(state["state"], single.state_dict()["state"], rtol=1e-5, atol=1e-6)
    assert all(found["state"] == {} for found, _ in results[1:])
    # Nobody describes what all parameters of a bucket have alike; a bucket of the nested state holds nothing else.
    assert (sum(told for _, told in results) > 0) == (change in ("steps_differ", "one_without") and world_size > 1)


@pytest.mark.parametrize("destination", [None, 1, 2])
def test_any_rank_may_collect(pool: RankPool, destination: int | None) -> None:
    results = pool.run(3, gathered, "steps_differ", destination)
    expected = pool.run(3, gathered, "steps_differ", 0)[0][0]
    for rank, (found, _) in enumerate(results):
        if destination in (None, rank):
            assert_same(found, expected)


def kept_by_one_rank() -> Any:
    module, optimizer, engine = train(True, alike)
    slots = {slot.parameter: slot for bucket in engine.buckets for slot in bucket.slots}
    slot = slots[module[0].weight]
    if dist.get_rank() == 1 and slot.shard is not None:
        optimizer.state[slot.shard]["own"] = torch.ones_like(slot.shard)
    elements = slot.elements_of(1)
    return gather_state_dict(optimizer, 0)["state"], elements.start, elements.stop


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_entry_of_one_rank_alone_is_zero_elsewhere(pool: RankPool, world_size: int) -> None:
    state, start, stop = pool.run(world_size, kept_by_one_rank)[0]
    own = state[0]["own"].flatten()
    expected = torch.zeros_like(own)
    expected[start:stop] = 1
    assert stop > start and torch.equal(own, expected)
    assert "own" not in state[1]
