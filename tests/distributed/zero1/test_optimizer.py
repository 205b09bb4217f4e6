"""Methods on the instance: same object, class and groups for everyone, and none of the ways around them."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast
from unittest.mock import call, patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.distributed.zero1.optimizer_sharding import _worth_a_call, is_sharded
from lightning_parstrat.distributed.zero1.summary import state_bytes_per_parameter_byte
from tests.comparing import assert_same
from tests.distributed.engines import backward, make_engine, sgd
from tests.pool import RankPool


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


def schedulers(made_before: int, made_after: int) -> tuple[list[str], list[float]]:
    """Two trainings and an ordinary step; returns warnings, and learning rates after each step."""
    module = linear()
    optimizer = sgd(module.parameters())

    def make(number: int) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(number)]

    made = make(made_before)
    rates = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for training in range(2):
            engine = make_engine(module, optimizer)
            made += make(made_after if training == 0 else 0)
            before = snapshot(module)
            backward(engine, loss_of(module))
            optimizer.step()
            for scheduler in made:
                scheduler.step()
            # None was passed by: this rank has stepped its shard only, and gathered the rest.
            owned = sum(shard.numel() for shard in optimizer._sharding.stand_ins(module.parameters()))
            assert sum(state["momentum_buffer"].numel() for state in optimizer.state.values()) == owned < 24
            assert stepped_in_full(module, before)
            rates.append(optimizer.param_groups[0]["lr"])
            engine.close()
        optimizer.step()
        for scheduler in made:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert not is_sharded(optimizer)
    return [str(warning.message) for warning in caught], rates


def test_schedulers_neither_bypass_the_sharding_nor_warn(pool: RankPool) -> None:
    lr = sgd(linear().parameters()).param_groups[0]["lr"]
    for made_before, made_after in ((1, 0), (0, 1), (2, 1)):
        expected = [lr * 0.5 ** (step * (made_before + made_after)) for step in (1, 2, 3)]
        for caught, rates in pool.run(2, schedulers, made_before, made_after):
            assert caught == [] and rates == pytest.approx(expected)


class GuardsAttributes(torch.optim.SGD):
    """Gets no public attributes but torch's own, and has none beside them."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("defaults", "state", "param_groups") or name.startswith("_")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class HasSlots(torch.optim.SGD):
    __slots__ = ("extra",)


class StepsInParts(torch.optim.SGD):
    """As SAM does: a step of other methods of its own, which zero gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        self.zero_grad()
        return loss


def left_as_it_was(make: Callable[..., Optimizer]) -> None:
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
    for make in (torch.optim.SGD, GuardsAttributes, HasSlots, StepsInParts):
        pool.run(2, left_as_it_was, make)


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


def mocked_class() -> None:
    """Programs' tests replace methods of torch's classes, by what is not bound to the object."""
    module = linear()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    backward(engine, loss_of(module))
    with patch("torch.optim.SGD.step") as step, patch("torch.optim.SGD.zero_grad") as zero_grad:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    # Once, as torch's own: small buckets are stepped together.
    assert len(engine.buckets) > 1 and step.call_args_list == [call()]
    zero_grad.assert_called_once_with(set_to_none=False)


def test_a_mock_in_the_class_is_called_as_ever(pool: RankPool) -> None:
    pool.run(2, mocked_class)


def methods_kept_from_the_training() -> None:
    """Whoever has kept a method goes on with the class's, when the optimizer is an ordinary one again."""
    module = linear()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    step, zero_grad, state_dict = optimizer.step, optimizer.zero_grad, optimizer.state_dict
    backward(engine, loss_of(module))
    step()
    engine.close()
    for _ in range(2):
        zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
        loss_of(module).backward()
        before = snapshot(module)
        step()
        assert stepped_in_full(module, before)
    assert_same(state_dict(), optimizer.state_dict())


def test_methods_kept_from_the_training_go_on_as_the_class_s(pool: RankPool) -> None:
    pool.run(2, methods_kept_from_the_training)


def step_hooks() -> tuple[list[int], list[int]]:
    module = linear()
    optimizer = sgd(module.parameters())
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(_full_elements(opt)))
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(_full_elements(opt)))
    engine = make_engine(module, optimizer)
    backward(engine, loss_of(module))
    optimizer.step()
    first = list(seen)
    optimizer.load_state_dict(optimizer.state_dict())
    seen.clear()
    backward(engine, loss_of(module))
    optimizer.step()
    return first, seen


def _full_elements(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def test_step_hooks_run_once_and_see_the_full_parameters_also_after_loading(pool: RankPool) -> None:
    assert pool.run(2, step_hooks) == [([24, 24], [24, 24])] * 2


class Exploding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] > 1:
            raise RuntimeError("step failed")
        return super().step(closure)


def exception_in_step() -> None:
    module = linear()
    optimizer = Exploding(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer)
    optimizer.param_groups[0]["lr"] = 2.0
    backward(engine, loss_of(module))
    with pytest.raises(RuntimeError, match="step failed"):
        optimizer.step()
    assert _full_elements(optimizer) == 24
    optimizer.param_groups[0]["lr"] = 0.1
    before = snapshot(module)
    optimizer.zero_grad()
    backward(engine, loss_of(module))
    optimizer.step()
    assert stepped_in_full(module, before)


def test_an_exception_in_step_leaves_the_groups_whole(pool: RankPool) -> None:
    pool.run(2, exception_in_step)


def zeroed_by(how: str) -> list[bool]:
    module = linear()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    backward(engine, loss_of(module))
    engine.reducer.finish(engine.buckets)
    optimizer.zero_grad(set_to_none=how == "none")
    engine.reducer.finish(engine.buckets)
    gradients = [shard.grad for shard in optimizer._sharding.stand_ins(module.parameters())]
    return [gradient is None if how == "none" else not gradient.any() for gradient in gradients]


def test_zero_grad_reaches_the_shards(pool: RankPool) -> None:
    for how in ("none", "zeros"):
        for zeroed in pool.run(2, zeroed_by, how):
            assert zeroed and all(zeroed)


def appended_parameters() -> None:
    """Around ``add_param_group``, and with a backward that was not announced."""
    module = nn.ModuleDict({"old": linear(), "new": linear()})
    reference = nn.ModuleDict({"old": linear(), "new": linear()})
    for one in (module, reference):
        optimizer = torch.optim.SGD(one["old"].parameters(), lr=0.1)
        if one is module:
            make_engine(one, optimizer).collect_unannounced_gradients(True)
        optimizer.param_groups[0]["params"] += list(one["new"].parameters())
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(one["old"]) + 2 * loss_of(one["new"])).backward()
            optimizer.step()
    for actual, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_parameters_appended_to_a_group_are_found(pool: RankPool) -> None:
    pool.run(2, appended_parameters)


def losses_in_turns(touches_both: bool) -> None:
    """A step makes the other loss's graph stale, as in torch, but only where it touched something of it."""
    module = nn.ModuleDict({"one": linear(), "two": linear()})
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    first = loss_of(module["one"]) + (loss_of(module["two"]) if touches_both else 0)
    second = (module["two"](torch.ones(2, 5)).pow(2) @ module["two"].weight).sum()
    backward(engine, first)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") if touches_both else nullcontext():
        backward(engine, second)


def test_a_graph_with_parameters_that_moved_is_an_error_as_in_torch(own_pool: RankPool) -> None:
    for touches_both in (False, True):
        own_pool.run(2, losses_in_turns, touches_both)


def test_state_is_foretold() -> None:
    foretold: list[tuple[Callable[[Any], Optimizer], float | None]] = [
        (lambda p: torch.optim.AdamW(p), 2.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), 3.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.Adagrad(p), 1.0),
        (lambda p: torch.optim.Adafactor(p), None),
        # torch refuses the probe's settings; a line in a log must not end a training.
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=True, foreach=True), None),
    ]
    for make, expected in foretold:
        assert state_bytes_per_parameter_byte(make(linear().parameters())) == expected


def traded_data(bucket_cap_mb: float) -> None:
    module = nn.ModuleList([linear(), linear()])
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=bucket_cap_mb)
    first, second = module[0].weight, module[1].weight
    first.data, second.data = second.data, first.data
    backward(engine, loss_of(module[0]) + loss_of(module[1]))
    optimizer.step()
    saved = engine.with_own_storage(dict(module.named_parameters()))
    engine.close()
    for tensor in (*saved.values(), *module.parameters()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_parameters_that_traded_data_get_ordinary_storage_too(pool: RankPool) -> None:
    for bucket_cap_mb in (1.0, 1e-6):
        pool.run(2, traded_data, bucket_cap_mb)


def groups_edited_in_place(sharded: bool) -> list[Tensor]:
    """A group's list loses a parameter, is turned around, and gets the parameter back, between steps."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    engine = make_engine(module, optimizer, bucket_cap_mb=8.0) if sharded else None
    for number in range(8):
        group = optimizer.param_groups[0]["params"]
        if number == 2:
            left = group.pop(1)
        elif number == 4:
            group.reverse()
        elif number == 6:
            group.append(left)
        optimizer.zero_grad()
        module.zero_grad()
        if engine is not None:
            backward(engine, loss_of(module))
        else:
            loss_of(module).backward()
        optimizer.step()
    if engine is not None:
        engine.gatherer.finish()
    return snapshot(module)


def test_groups_that_are_edited_in_place_are_noticed(pool: RankPool) -> None:
    (expected,) = pool.run(1, groups_edited_in_place, False)
    for world_size in (1, 2):
        for found in pool.run(world_size, groups_edited_in_place, True):
            torch.testing.assert_close(found, expected)


class Sized(NamedTuple):
    """What is looked at of a bucket to find out how many are stepped by one call."""

    layout: BucketLayout
    device: torch.device


def test_calls_go_by_the_bytes_of_shards_and_are_few_on_a_gpu() -> None:
    for mib, device, calls in (
        ([0.25] * 8, "cpu", 2),
        ([2.0] * 20, "cpu", 20),
        ([2.0] * 20, "cuda", 7),
        ([0.25] * 8, "cuda", 2),
        ([100.0, 0.5, 0.5], "cuda", 2),
    ):
        # Shards of half of that.
        buckets = [
            Sized(BucketLayout((), range(0, int(size * 2**21) + 1, int(size * 2**20)), 1), torch.device(device))
            for size in mib
        ]
        together = _worth_a_call(cast(Any, buckets))
        assert len(together) == calls
        assert [bucket for group in together for bucket in group] == buckets
