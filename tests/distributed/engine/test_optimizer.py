"""Methods on the instance: same object, class and groups for everyone; and what copies and later steps make of it."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.state import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.engine.stepping import is_sharded
from tests.comparing import assert_same
from tests.distributed.engines import adafactor, adagrad, adamw, backward, make_engine, sgd, squared_error
from tests.pool import RankPool
from tests.torch_versions import is_before


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4)


def loss_of(module: nn.Module) -> Tensor:
    return module(torch.ones(2, 5)).pow(2).sum()


def stepped_in_full(module: nn.Module, before: list[Tensor]) -> bool:
    """Whether every element moved, on every rank: those this rank owns and those it gathered."""
    return all(bool((now != then).all()) for now, then in zip(module.parameters(), before, strict=True))


def snapshot(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


class StepsInParts(torch.optim.SGD):
    """As SAM does: a step of other methods of its own, which zero gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        self.zero_grad()
        return loss


def left_as_it_was() -> None:
    for make in (torch.optim.SGD, StepsInParts):
        module = linear()
        optimizer = make(module.parameters(), lr=0.1, momentum=0.9)
        cls, names = type(optimizer), set(vars(optimizer))
        hooks = dict(optimizer._optimizer_step_pre_hooks)
        parameters, groups = list(module.parameters()), optimizer.param_groups
        engine = make_engine(module, optimizer)
        assert type(optimizer) is optimizer.__class__ is cls and optimizer.param_groups is groups
        assert [id(one) for one in module.parameters()] == [id(one) for one in parameters]
        assert [id(one) for one in groups[0]["params"]] == [id(one) for one in parameters]
        before = snapshot(module)
        backward(engine, loss_of(module))
        optimizer.step()
        assert stepped_in_full(module, before) and is_sharded(optimizer) and type(optimizer) is cls
        engine.close()
        optimizer.step()
        # What schedulers ask for may stay.
        assert set(vars(optimizer)) - {"_opt_called"} == names and type(optimizer) is cls
        assert optimizer._optimizer_step_pre_hooks == hooks


def test_an_optimizer_is_left_as_it_was(pool: RankPool) -> None:
    pool.run(2, left_as_it_was)


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


# What comes after a training: beside an optimizer of a single process.


def net() -> nn.Sequential:
    """More than one stride, so that there are several kinds of shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(20, 7))


# The same on all ranks: the twin is a single process's.
image_loss = partial(squared_error, shape=(3, 2, 4, 4), target=0.1)


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [adamw, sgd, adagrad, adafactor]


def stepped(make: Callable[[Any], Optimizer], sharded: int, steps: int) -> tuple[nn.Module, Optimizer]:
    """Two steps and more, of which the first ones are sharded; a parameter is added after two. Closures see all."""
    module: Any = net()
    optimizer = make(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=3e-4) if sharded else None
    for number in range(steps):
        if number == 2:
            if engine is not None:
                engine.close()
            module.extra = nn.Parameter(torch.ones(3))
            optimizer.add_param_group({"params": [module.extra], "lr": 0.01})

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = image_loss(module, number) + (module.extra.sum() if number >= 2 else 0)
            if number < sharded:
                backward(engine, loss)
            else:
                loss.backward()
            return loss

        optimizer.step(closure)
    return module, optimizer


def copies() -> None:
    _, optimizer = stepped(adamw, 2, 2)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is type(optimizer) and not is_sharded(copied)
        for read in (copied.step, copied.state_dict, lambda one=copied: copy.deepcopy(one)):
            with pytest.raises(RuntimeError, match="copy of a sharded one, without its state"):
                read()
        copied.load_state_dict(optimizer.state_dict())
        assert_same(copied.state_dict(), optimizer.state_dict())
        copied.step()


def test_a_copy_needs_its_state(pool: RankPool) -> None:
    pool.run(2, copies)


def after_a_training(makers: list[Callable[[Any], Optimizer]]) -> None:
    for make in makers:
        (module, optimizer), (twin, twins) = (stepped(make, sharded, 4) for sharded in (2, 0))
        assert type(optimizer) is type(twins)
        close = {"rtol": 1e-5, "atol": 1e-7}
        assert_same(
            [list(module.parameters()), optimizer.state_dict()], [list(twin.parameters()), twins.state_dict()], **close
        )


def test_an_optimizer_goes_on_as_an_ordinary_one_after_its_training(pool: RankPool) -> None:
    # Adagrad of older versions cannot step an added parameter, sharded or not.
    tried = [make for make in OPTIMIZERS if make is not adagrad or not is_before("2.13")]
    for world_size, makers in ((2, tried), (1, [adamw]), (3, [adafactor])):
        pool.run(world_size, after_a_training, makers)
