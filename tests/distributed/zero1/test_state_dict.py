"""`optimizer.state` by parameter, while it is kept by shard."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parstrat.distributed.zero1.state_dict import StateByShard
from tests.distributed.engines import backward, make_engine, sgd
from tests.pool import RankPool


def two_steps() -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    module = nn.Linear(5, 7)
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    for _ in range(2):
        backward(engine, module(torch.ones(2, 5)).pow(2).mean())
        optimizer.step()
    return module, optimizer, engine


def reading() -> tuple[bool, int]:
    module, optimizer, engine = two_steps()
    slots = {slot.parameter: slot for bucket in engine.buckets for slot in bucket.slots}
    elements = 0
    for parameter in module.parameters():
        slot = slots[parameter]
        assert (parameter in optimizer.state) == (slot.shard is not None)
        assert optimizer.state.get(parameter) is (None if slot.shard is None else optimizer.state[slot.shard])
        if slot.shard is not None:
            assert optimizer.state[parameter] is optimizer.state[slot.shard]
            elements += optimizer.state[parameter]["momentum_buffer"].numel()
        else:
            assert optimizer.state[parameter] == {} and parameter not in optimizer.state
    return isinstance(optimizer.state, StateByShard), elements


def loading() -> tuple[bool, int]:
    _, optimizer, _ = two_steps()
    optimizer.load_state_dict(optimizer.state_dict())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    return isinstance(optimizer.state, StateByShard), sum(state["momentum_buffer"].numel() for state in held)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", [reading, loading])
def test_the_parts_of_all_ranks_make_the_whole(
    pool: RankPool, way: Callable[[], tuple[bool, int]], world_size: int
) -> None:
    results = pool.run(world_size, way)
    assert all(kind for kind, _ in results)
    assert sum(elements for _, elements in results) == 5 * 7 + 7


def writing() -> float:
    module, optimizer, _ = two_steps()
    whole = torch.arange(35.0).view(7, 5)
    optimizer.state[module.weight] = {"momentum_buffer": whole, "note": "kept"}
    optimizer.state.pop(module.bias, None)
    assert module.bias not in optimizer.state
    if module.weight in optimizer.state:
        assert optimizer.state[module.weight]["note"] == "kept"
    saved = optimizer.state_dict()["state"]
    assert list(saved) == [0] and torch.equal(saved[0]["momentum_buffer"], whole)
    if module.weight in optimizer.state:
        del optimizer.state[module.weight]
    assert optimizer.state_dict()["state"] == {}
    return float(dist.get_rank())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_written_by_parameter_is_what_is_saved(pool: RankPool, world_size: int) -> None:
    assert len(pool.run(world_size, writing)) == world_size


def state_of_a_parameter_that_joins() -> float:
    module, optimizer, engine = two_steps()
    late = nn.Parameter(torch.ones(6))
    optimizer.state[late] = {"momentum_buffer": torch.arange(6.0)}
    optimizer.param_groups[0]["params"].append(late)
    backward(engine, module(torch.ones(2, 5)).pow(2).mean() + 0 * late.sum())
    optimizer.step()
    torch.testing.assert_close(late.detach(), 1 - 0.1 * 0.9 * torch.arange(6.0))
    return float(optimizer.state_dict()["state"][2]["momentum_buffer"].sum())


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_was_there_before_is_sharded_with_its_parameter(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, state_of_a_parameter_that_joins) == [pytest.approx(0.9 * 15)] * world_size


def asked_with_hooks() -> tuple[list[str], Any]:
    _, optimizer, _ = two_steps()
    seen: list[str] = []

    def change(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(f"after {[tuple(state['momentum_buffer'].shape) for state in state_dict['state'].values()]}")
        return {**state_dict, "note": len(seen)}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_state_dict_post_hook(change)
    return seen, optimizer.state_dict()["note"]


def test_hooks_of_a_state_dict_run_once_and_see_unsharded_state(pool: RankPool) -> None:
    assert pool.run(2, asked_with_hooks) == [(["before", "after [(7, 5), (7,)]"], 2)] * 2
