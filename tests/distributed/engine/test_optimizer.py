"""Methods on the instance: what a step around them, copies and hooks of a state dict get."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.state import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.engine.stepping import is_sharded
from tests.comparing import assert_same
from tests.distributed.engines import adamw, backward, make_engine, sgd
from tests.pool import RankPool


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4)


def loss_of(module: nn.Module) -> Tensor:
    return module(torch.ones(2, 5)).pow(2).sum()


def around_the_sharding(afterwards: bool) -> list[str]:
    """Steps by the class, by a method kept from before, and by what is found when the method was taken away."""
    module = linear()
    optimizer = sgd(module.parameters())
    kept = optimizer.step
    engine = make_engine(module, optimizer)
    backward(engine, loss_of(module))
    if afterwards:
        engine.close()
    messages = []
    for step in (lambda: torch.optim.SGD.step(optimizer), kept, lambda: optimizer.step()):
        with pytest.raises(RuntimeError) as caught:
            step()
        messages.append(str(caught.value))
        vars(optimizer).pop("step", None)
    return messages


def test_a_step_around_the_sharding_is_refused(pool: RankPool) -> None:
    for afterwards in (False, True):
        for messages in pool.run(2, around_the_sharding, afterwards):
            assert all("Call `optimizer.step()`, not `SGD.step(optimizer)`" in message for message in messages)


def test_the_size_of_the_state_is_known_before() -> None:
    known: list[tuple[Callable[[Any], Optimizer], float | None]] = [
        (lambda p: torch.optim.AdamW(p), 2.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), 3.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.Adagrad(p), 1.0),
        (lambda p: torch.optim.Adafactor(p), None),
        # torch refuses the probe's settings; a line in a log must not end a training.
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=True, foreach=True), None),
    ]
    for make, expected in known:
        assert state_bytes_per_parameter_byte(make(linear().parameters())) == expected


def stepped() -> tuple[nn.Module, Optimizer]:
    module = linear()
    optimizer = adamw(module.parameters())
    engine = make_engine(module, optimizer)
    backward(engine, loss_of(module))
    optimizer.step()
    return module, optimizer


def copies() -> None:
    _, optimizer = stepped()
    first = copy.deepcopy(optimizer)
    for copied in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is type(optimizer) and not is_sharded(copied)
        for parameter in (one for group in copied.param_groups for one in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        for read in (copied.step, copied.state_dict):
            with pytest.raises(RuntimeError, match="copy of a sharded one, without its state"):
                read()
        copied.load_state_dict(optimizer.state_dict())
        assert_same(copied.state_dict(), optimizer.state_dict())
        copied.step()


def test_a_copy_needs_its_state(pool: RankPool) -> None:
    pool.run(2, copies)


def asked_with_hooks() -> tuple[list[Any], int]:
    _, optimizer = stepped()
    seen: list[Any] = []

    def change(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append([tuple(state["exp_avg"].shape) for state in state_dict["state"].values()])
        return {**state_dict, "note": len(seen)}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_state_dict_post_hook(change)
    return seen, optimizer.state_dict()["note"]


def test_hooks_of_a_state_dict_run_once_and_see_unsharded_state(pool: RankPool) -> None:
    assert pool.run(2, asked_with_hooks) == [(["before", [(4, 5), (4,)]], 2)] * 2
