"""Copies and pickles of a sharded optimizer hold this rank's part; used on all ranks together, they become whole."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from abc import ABC
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded
from tests.comparing import assert_same
from tests.distributed.engines import backward, make_engine, squared_error
from tests.pool import RankPool


def net() -> nn.Sequential:
    """More than one dtype and stride, so that there are several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(20, 7))


# The same on all ranks: the twin is a single process's.
loss_of = partial(squared_error, shape=(3, 2, 4, 4), target=0.1)


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(
        [{"params": list(module[0].parameters()), "lr": 0.01}, {"params": list(module[2].parameters())}],
        lr=0.02,
        eps=1e-4,
    )


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adagrad(module: nn.Module) -> Optimizer:
    """Has state before it has stepped."""
    return torch.optim.Adagrad(module.parameters(), lr=0.05, initial_accumulator_value=0.1)


def adafactor(module: nn.Module) -> Optimizer:
    """Whole parameters, some of its state without the parameter's shape."""
    return torch.optim.Adafactor(module.parameters(), lr=0.01)


class HasAnotherBase(ABC, torch.optim.SGD):
    """Its objects are laid out otherwise than SGD's."""


def another_base(module: nn.Module) -> Optimizer:
    return HasAnotherBase(module.parameters(), lr=0.1, momentum=0.9)


def scheduled(module: nn.Module) -> Optimizer:
    """A scheduler's wrapper of `step` does not come along, as with torch's own copies."""
    optimizer = sgd(module)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: list[Make] = [adamw, sgd, adagrad, adafactor, another_base, scheduled]
WORLD_SIZES = [1, 2, 3]


def in_the_middle(make: Make, steps: int = 2) -> tuple[Any, nn.Module, Optimizer, nn.Module, Optimizer]:
    """An engine, a module and its sharded optimizer; and the same, unsharded."""
    module, twin = net(), net()
    optimizer, twins = make(module), make(twin)
    engine = make_engine(module, optimizer, bucket_cap_mb=3e-4)
    for number in range(steps):
        step_both(engine, module, optimizer, twin, twins, number)
    return engine, module, optimizer, twin, twins


def step_both(
    engine: Any, module: nn.Module, optimizer: Optimizer, twin: nn.Module, twins: Optimizer, number: int
) -> None:
    for one in (optimizer, twins):
        one.zero_grad()
    backward(engine, loss_of(module, number))
    loss_of(twin, number).backward()
    for one in (optimizer, twins):
        one.step()


def by_deepcopy(value: Any) -> Any:
    return copy.deepcopy(value)


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [by_deepcopy, by_pickle, by_file]


def assert_same_state(actual: Any, expected: Any) -> None:
    """Of state dicts: what rounds is compared closely, everything else exactly."""
    assert_same(actual, expected, rtol=1e-5, atol=1e-7)


def assert_same_parameters(optimizer: Optimizer, twins: Optimizer) -> None:
    assert_same_state(*([group["params"] for group in one.param_groups] for one in (optimizer, twins)))


def set_gradients(optimizer: Optimizer) -> None:
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            number += 1
            generator = torch.Generator().manual_seed(100 + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def copy_goes_on_by_itself(make: Make, copied_by: Callable[[Any], Any], steps: int) -> None:
    engine, module, optimizer, twin, twins = in_the_middle(make, steps)
    copied, copied_twin = copied_by(optimizer), copied_by(twins)
    originals = {id(parameter) for parameter in module.parameters()}
    assert all(id(parameter) not in originals for group in copied.param_groups for parameter in group["params"])
    assert_same_state(copied.state_dict(), optimizer.state_dict())
    assert_same_state(copied.state_dict(), twins.state_dict())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(2):
        for one in (copied, copied_twin):
            set_gradients(one)
            one.step()
        assert_same_parameters(copied, copied_twin)
    assert_same_state(copied.state_dict(), copied_twin.state_dict())
    assert type(copied) is type(twins)
    # The original has noticed nothing of it.
    assert all(torch.equal(now, then) for now, then in zip(module.parameters(), before, strict=True))
    for number in (2, 3):
        step_both(engine, module, optimizer, twin, twins, number)
        assert_same_parameters(optimizer, twins)
    assert_same_state(optimizer.state_dict(), twins.state_dict())


def copies_of_all(size: int) -> None:
    # Each optimizer is copied on each number of ranks, and in each way.
    for number, make in enumerate(OPTIMIZERS):
        copy_goes_on_by_itself(make, COPIES[(number + size) % len(COPIES)], 0 if (number + size) % 3 == 0 else 2)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_copy_has_the_whole_state_and_goes_on_by_itself(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, copies_of_all, world_size)


class HoldsItsOptimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.optimizer = adamw(self.net)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def module_with_its_optimizer(copied_by: Callable[[Any], Any]) -> None:
    module, twin = HoldsItsOptimizer(), HoldsItsOptimizer()
    engine = make_engine(module, module.optimizer, bucket_cap_mb=3e-4)
    step_both(engine, module, module.optimizer, twin, twin.optimizer, 0)
    copied, copied_twin = copied_by(module), copied_by(twin)
    # They belong together: a step of the copied optimizer moves the copied module.
    for number in (1, 2):
        for one in (copied, copied_twin):
            one.optimizer.zero_grad()
            loss_of(one, number).backward()
            one.optimizer.step()
        assert_same_state(copied.state_dict(), copied_twin.state_dict())
    step_both(engine, module, module.optimizer, twin, twin.optimizer, 1)
    assert_same_state(module.state_dict(), twin.state_dict())


def test_a_module_that_holds_its_optimizer_is_copied_with_it(pool: RankPool) -> None:
    for copied_by, world_size in zip(COPIES, WORLD_SIZES, strict=True):
        pool.run(world_size, module_with_its_optimizer, copied_by)


def copy_on_one_rank(make: Make, copied_by: Callable[[Any], Any]) -> None:
    engine, module, optimizer, twin, twins = in_the_middle(make)
    if dist.get_rank() == 0:
        copied = copied_by(optimizer)
        # What can be seen without the others.
        assert [group["lr"] for group in copied.param_groups] == [group["lr"] for group in optimizer.param_groups]
        assert_same_parameters(copied, optimizer)
        assert repr(copied) == repr(optimizer)
        copied.zero_grad()
    step_both(engine, module, optimizer, twin, twins, 2)
    assert_same_parameters(optimizer, twins)


def test_copying_needs_no_other_rank(pool: RankPool) -> None:
    for make, copied_by in ((adamw, by_deepcopy), (adafactor, by_pickle), (adamw, by_file)):
        pool.run(2, copy_on_one_rank, make, copied_by)


def copy_of_a_copy() -> None:
    *_, optimizer, _, twins = in_the_middle(adamw)
    copied = by_pickle(copy.deepcopy(optimizer))
    copied_twin = copy.deepcopy(twins)
    for one in (copied, copied_twin):
        set_gradients(one)
        one.step()
    again = copy.deepcopy(copied)
    assert type(again) is torch.optim.AdamW
    assert_same_state(again.state_dict(), copied_twin.state_dict())
    assert_same_parameters(again, copied_twin)
    # It takes a state dict, as any optimizer does, and goes on from there.
    earlier = copy.deepcopy(twins.state_dict())
    for one in (again, copied_twin):
        one.load_state_dict(copy.deepcopy(earlier))
        set_gradients(one)
        one.step()
    assert_same_parameters(again, copied_twin)
    assert_same_state(again.state_dict(), copied_twin.state_dict())


def test_copies_can_be_copied_and_loaded_into(pool: RankPool) -> None:
    pool.run(2, copy_of_a_copy)


def shallow_copy() -> None:
    """It shares everything with its original, as torch's does: a step of the one is a step of the other."""
    engine, module, optimizer, twin, twins = in_the_middle(adamw)
    copied, copied_twin = copy.copy(optimizer), copy.copy(twins)
    for number, (one, other) in enumerate(((copied, copied_twin), (optimizer, twins), (copied, copied_twin))):
        assert type(one) is type(other)
        for opt in (one, other):
            opt.zero_grad()
        backward(engine, loss_of(module, number))
        loss_of(twin, number).backward()
        for opt in (one, other):
            opt.step()
        assert_same_parameters(optimizer, twins)
        assert_same_state(one.state_dict(), other.state_dict())


def test_a_shallow_copy_steps_its_original(pool: RankPool) -> None:
    pool.run(2, shallow_copy)


def freed_at_once() -> None:
    """Nothing waits for the garbage collector: state may be most of what a process holds."""
    engine, _, optimizer, _, _ = in_the_middle(adamw)
    copied = copy.deepcopy(optimizer)
    engine.close()
    gone = weakref.ref(copied)
    zero_grad = copied.zero_grad
    gc.disable()
    try:
        del copied
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="`zero_grad` was called is gone"):
        zero_grad()


def test_a_copy_is_freed_at_once(pool: RankPool) -> None:
    pool.run(2, freed_at_once)


def a_new_fit_with_a_copy() -> None:
    """A copy is sharded anew as its original would be: its state comes along."""
    module, twin = HoldsItsOptimizer(), HoldsItsOptimizer()
    engine = make_engine(module, module.optimizer, bucket_cap_mb=3e-4)
    step_both(engine, module, module.optimizer, twin, twin.optimizer, 0)
    copied = copy.deepcopy(module)
    engine.close()
    again = make_engine(copied, copied.optimizer, bucket_cap_mb=1.0)
    assert is_sharded(copied.optimizer)
    for number in (1, 2):
        step_both(again, copied, copied.optimizer, twin, twin.optimizer, number)
    assert_same_state(copied.state_dict(), twin.state_dict())
    assert_same_state(copied.optimizer.state_dict(), twin.optimizer.state_dict())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_copy_is_trained_by_another_engine(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, a_new_fit_with_a_copy)


def write_parts(folder: str) -> None:
    *_, optimizer, _, _ = in_the_middle(adamw)
    Path(folder, str(dist.get_rank())).write_bytes(pickle.dumps(optimizer))


@pytest.mark.slow
def test_a_part_without_the_others_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, write_parts, str(tmp_path))
    for use in ("optimizer.state_dict()", "optimizer.step()"):
        script = f"import pickle, sys; optimizer = pickle.load(open(sys.argv[1], 'rb')); {use}"
        ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "1")], capture_output=True, text=True)
        assert ended.returncode == 1
        message = ended.stderr.strip().splitlines()[-1]
        assert message.startswith("RuntimeError: This copy of a sharded AdamW holds one of 2 parts of its state, and 0")
        assert "`optimizer.state_dict()`, called on all ranks" in message


def use_parts_of_two(folder: str) -> str:
    optimizer = pickle.loads(Path(folder, "0").read_bytes())
    with pytest.raises(RuntimeError) as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_parts_for_another_number_of_ranks_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, write_parts, str(tmp_path))
    for message in pool.run(3, use_parts_of_two, str(tmp_path)):
        assert "holds one of 2 parts" in message and "3 ranks are there" in message


def read_parts(folder: str) -> None:
    *_, twins = in_the_middle(adamw)
    optimizer = pickle.loads(Path(folder, str(dist.get_rank())).read_bytes())
    assert_same_state(optimizer.state_dict(), twins.state_dict())


def test_parts_are_whole_again_in_other_processes(pool: RankPool, own_pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, write_parts, str(tmp_path))
    own_pool.run(2, read_parts, str(tmp_path))


def goes_on_after_closing(make: Make) -> None:
    engine, module, optimizer, twin, twins = in_the_middle(make)
    engine.close()
    for number in (2, 3):
        for one, opt in ((module, optimizer), (twin, twins)):
            opt.zero_grad()
            loss_of(one, number).backward()
            opt.step()
        assert_same_parameters(optimizer, twins)
    assert type(optimizer) is type(twins)
    assert_same_state(optimizer.state_dict(), twins.state_dict())


def all_go_on_after_closing(makers: list[Make]) -> None:
    for make in makers:
        goes_on_after_closing(make)


def test_an_optimizer_goes_on_as_an_ordinary_one_after_its_training(pool: RankPool) -> None:
    for world_size, makers in ((2, OPTIMIZERS), (1, [adamw]), (3, [adafactor])):
        pool.run(world_size, all_go_on_after_closing, makers)


def hooks_and_groups_after_closing() -> tuple[list[int], list[int]]:
    """What an ordinary optimizer does: hooks run once and see full parameters, groups can be added, closures run."""
    engine, module, optimizer, twin, twins = in_the_middle(sgd)
    engine.close()
    seen: tuple[list[int], list[int]] = ([], [])
    for one, opt, log in ((module, optimizer, seen[0]), (twin, twins, seen[1])):
        for register in (opt.register_step_pre_hook, opt.register_step_post_hook):
            register(lambda o, *_, log=log: log.append(sum(p.numel() for g in o.param_groups for p in g["params"])))
        one.extra = nn.Parameter(torch.ones(3))
        opt.add_param_group({"params": [one.extra], "lr": 0.01})

        def closure(one: nn.Module = one, opt: Optimizer = opt) -> Tensor:
            opt.zero_grad()
            loss = loss_of(one, 2) + one.extra.sum()
            loss.backward()
            return loss

        for _ in range(2):
            opt.step(closure)
    assert_same_parameters(optimizer, twins)
    assert_same_state(optimizer.state_dict(), twins.state_dict())
    return seen


def test_after_its_training_everything_else_is_ordinary_too(pool: RankPool) -> None:
    for sharded, ordinary in pool.run(2, hooks_and_groups_after_closing):
        assert sharded == ordinary and len(sharded) == 4


def scheduler_after_closing() -> None:
    module, twin = net(), net()
    optimizer, twins = sgd(module), sgd(twin)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, twins)]
    engine = make_engine(module, optimizer)
    step_both(engine, module, optimizer, twin, twins, 0)
    engine.close()
    for number in (1, 2):
        for scheduler in schedulers:
            scheduler.step()
        for one, opt in ((module, optimizer), (twin, twins)):
            opt.zero_grad()
            loss_of(one, number).backward()
            opt.step()
        assert_same_parameters(optimizer, twins)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in twins.param_groups]


def test_a_scheduler_goes_on_too(pool: RankPool) -> None:
    pool.run(2, scheduler_after_closing)
