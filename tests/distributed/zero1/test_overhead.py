"""What a step costs the interpreter grows with the number of parameters, by little for each."""

import sys
from types import FrameType
from typing import Any

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
