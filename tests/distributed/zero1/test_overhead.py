"""What a step costs the interpreter grows with the number of parameters, by little for each."""

import sys
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lightning_parstrat
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

OWN = lightning_parstrat.__path__[0]


def calls_in_a_step(tensors: int, cap: float) -> tuple[int, int]:
    """Python functions of this package called in one step, and calls of the optimizer's own ``step``."""
    module = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(tensors))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer, bucket_cap_mb=cap)
    counted = {"calls": 0, "steps": 0}

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counted["calls"] += frame.f_code.co_filename.startswith(OWN)
            counted["steps"] += frame.f_code is original

    def step() -> None:
        engine.prepare_forward()
        hidden = torch.ones(2, 4)
        for layer in module:
            hidden = layer(hidden)
        optimizer.zero_grad()
        backward(engine, hidden.sum())
        optimizer.step()

    original = _undecorated(torch.optim.AdamW).__code__
    for _ in range(4):
        step()
    # Whether parameters are still in flight when forward reads them, which takes calls, is a matter of time.
    engine.gatherer.finish()
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    engine.gatherer.finish()
    return counted["calls"], counted["steps"]


def _undecorated(cls: type[Optimizer]) -> Any:
    function: Any = cls.step
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


TEN_TENSORS = 64 * 10 / 2**20


@pytest.mark.parametrize(("cap", "calls"), [(8.0, 2), (TEN_TENSORS, 16)], ids=["one bucket", "ten tensors a bucket"])
def test_a_parameter_more_costs_few_calls(own_pool: RankPool, cap: float, calls: int) -> None:
    # In processes of its own: while anything is in flight that another test has left, every module's call is looked at.
    few, _ = own_pool.run(2, calls_in_a_step, 100, cap)[0]
    many, _ = own_pool.run(2, calls_in_a_step, 300, cap)[0]
    assert (many - few) / 200 <= calls


def test_small_buckets_are_stepped_by_one_call(pool: RankPool) -> None:
    assert [steps for _, steps in pool.run(2, calls_in_a_step, 100, 8.0)] == [1, 1]
    assert [steps for _, steps in pool.run(2, calls_in_a_step, 100, TEN_TENSORS)] == [1, 1]


def calls_by_megabytes(shapes: list[tuple[int, int]]) -> int:
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0)
    backward(engine, torch.stack([parameter.sum() for parameter in module]).sum())
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    with patch("torch.optim.SGD.step", counted):
        optimizer.step()
    engine.gatherer.finish()
    return count


MIB_OF_FLOATS = (512, 512)
FOUR_MIB_OF_FLOATS = (1024, 1024)


@pytest.mark.parametrize(
    ("shapes", "by_world_size"),
    [
        # Of shards of half, a third and a quarter of a MiB, as many as make up one are stepped together.
        ([MIB_OF_FLOATS] * 12, {2: 6, 3: 4, 4: 3}),
        ([FOUR_MIB_OF_FLOATS] * 3, {2: 3, 4: 3}),
        ([FOUR_MIB_OF_FLOATS, MIB_OF_FLOATS, MIB_OF_FLOATS], {2: 2}),
    ],
)
def test_the_calls_of_a_step_go_by_the_bytes_that_a_rank_steps(
    pool: RankPool, shapes: list[tuple[int, int]], by_world_size: dict[int, int]
) -> None:
    for world_size, calls in by_world_size.items():
        assert pool.run(world_size, calls_by_megabytes, shapes) == [calls] * world_size
