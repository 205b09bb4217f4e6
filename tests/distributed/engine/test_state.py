"""The state of a sharded optimizer is whole on the rank that saves it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parstrat.distributed.engine.state import gather_state_dict
from lightning_parstrat.distributed.engine.stepping import sharding_of
from tests.comparing import assert_same
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

WIDTH = 48


def train(sharded: bool, change: Callable[[Any], None]) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = make_engine(module, optimizer, bucket_cap_mb=1e-2) if sharded else None
    for _ in range(2):
        loss = module(torch.ones(2, WIDTH)).pow(2).mean()
        if engine is None:
            loss.backward()
        else:
            backward(engine, loss)
        optimizer.step()
        optimizer.zero_grad()
    change(optimizer)
    return optimizer


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


CHANGES = (alike, steps_differ, one_without, nested)


def gathered(change: Callable[[Any], None]) -> Any:
    optimizer = train(True, change)
    return gather_state_dict(optimizer, sharding_of(optimizer).shards)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_state_of_one_process(pool: RankPool, world_size: int) -> None:
    for change in CHANGES:
        single = train(False, change)
        results = pool.run(world_size, gathered, change)
        assert_same(results[0]["state"], single.state_dict()["state"], rtol=1e-5, atol=1e-6)
        assert all(found["state"] == {} for found in results[1:])


def asked_with_hooks() -> tuple[list[str], Any]:
    optimizer = train(True, alike)
    seen: list[str] = []

    def change(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(f"after {[len(state['exp_avg']) for state in state_dict['state'].values()]}")
        return {**state_dict, "note": len(seen)}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_state_dict_post_hook(change)
    return seen, optimizer.state_dict()["note"]


def test_hooks_of_a_state_dict_run_once_and_see_unsharded_state(pool: RankPool) -> None:
    assert pool.run(2, asked_with_hooks) == [(["before", f"after {[WIDTH] * 6 + [1, 1]}"], 2)] * 2
