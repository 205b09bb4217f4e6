"""Buckets planned anew by when gradients are ready: everything moves along, and nothing else changes."""

import copy
import gc
import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from lightning_parstrat.distributed.zero1.redistribution import Move, _describe, _digest, _Known, digests_of_owners
from lightning_parstrat.distributed.zero1.state import MASTER_WEIGHTS
from tests.comparing import assert_same, distance
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

STEPS = 6


class Shuffled(nn.Module):
    """Registered in another order than it is used in, so that the first plan is a bad one; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(9, 4)
        self.unused = nn.Linear(3, 3)
        self.first = nn.Linear(7, 33)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.second = nn.Linear(33, 9, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(inputs))))) * self.scale


def adamw(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=0.03, weight_decay=0.1)]


def adagrad(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adagrad(module.parameters(), lr=0.03, initial_accumulator_value=0.1)]


def two(module: nn.Module) -> list[Optimizer]:
    first = [*module.first.parameters(), module.scale]
    others = [p for p in module.parameters() if all(p is not other for other in first)]
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.03)]


def adafactor(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adafactor(module.parameters(), lr=0.03)]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


MAKERS = {maker.__name__: maker for maker in (adamw, adagrad, two, adafactor, muon)}


def train_step(
    engine: ShardedDataParallel,
    module: nn.Module,
    optimizers: list[Optimizer],
    step: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    engine.prepare_forward()
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss = module(torch.randn(5, 7, generator=generator).to(dtype)).float().square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    engine.prepare_backward(loss)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def train(
    maker: str, order: str, dtype: torch.dtype = torch.float32, cap: float = 3e-4, **policy: Any
) -> tuple[list[Tensor], list[Any], list[list[str]], list[list[str]]]:
    torch.manual_seed(0)
    module = Shuffled().to(dtype)
    optimizers = MAKERS[maker](module)
    chosen = ShardingPolicy(bucket_cap_mb=cap, bucket_order=order, **policy)
    engine = ShardedDataParallel(module, optimizers, chosen, process_groups())
    before = engine.plan
    for step in range(STEPS):
        train_step(engine, module, optimizers, step, dtype)
    engine.gatherer.finish()
    states = [optimizer.state_dict() for optimizer in optimizers]
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    after = engine.plan
    engine.close()
    return parameters, states, before, after


# Optimizer, ranks, how many share a copy, and the dtype.
MOVES: list[tuple[str, int, Any, torch.dtype]] = [
    ("adamw", 2, "all", torch.float32),
    ("adagrad", 3, "all", torch.float32),
    ("two", 3, "all", torch.bfloat16),
    ("two", 4, 2, torch.float32),
    ("adafactor", 3, "all", torch.float32),
    ("muon", 4, 2, torch.float32),
    ("adamw", 3, "all", torch.bfloat16),
    ("adamw", 4, 2, torch.bfloat16),
]


@pytest.mark.parametrize(("maker", "world_size", "shard_group", "dtype"), MOVES, ids=str)
def test_parameters_and_state_are_those_without_a_new_plan(
    pool: RankPool, maker: str, world_size: int, shard_group: Any, dtype: torch.dtype
) -> None:
    moved = pool.run(world_size, partial(train, shard_group=shard_group), maker, "measured", dtype)
    stayed = pool.run(world_size, partial(train, shard_group=shard_group), maker, "registration", dtype)
    for (parameters, states, before, after), (expected, expected_states, first, last) in zip(
        moved, stayed, strict=True
    ):
        assert before == first == last
        assert after != before and after == moved[0][3]
        if maker in ("adamw", "adagrad") or dtype == torch.bfloat16:
            # To the last bit: sums over ranks are made in rank order, whoever owns them.
            assert_same(parameters, expected)
            assert_same(states, expected_states)
            assert all((MASTER_WEIGHTS in state) == (dtype == torch.bfloat16) for state in states)
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("maker", ["adamw", "muon"])
def test_the_plan_follows_the_gradients_and_what_has_none_comes_last(pool: RankPool, maker: str) -> None:
    """Also where buckets of matrices that stay uncut and of all else leave in one order."""
    names = [name for name, _ in Shuffled().named_parameters()]
    ((_, _, before, after), *_) = pool.run(2, train, maker, "measured", torch.float32, 1e-6)
    assert before == [[name] for name in reversed(names)]
    ordered = [name for bucket in after for name in bucket]
    assert sorted(ordered) == sorted(names)
    used = [name for name in ordered if not name.startswith(("unused", "frozen"))]
    assert ordered[: len(used)] == used
    assert list(dict.fromkeys(name.split(".")[0] for name in used)) == ["scale", "third", "second", "first"]


def resumed(world_size: int) -> tuple[bool, bool, bool]:
    """Whether an engine that is given a plan has it, and keeps it, and one of another module does not have it."""
    *_, plan = train("adamw", "measured")
    torch.manual_seed(0)
    module = Shuffled()
    policy = ShardingPolicy(bucket_cap_mb=3e-4)
    engine = ShardedDataParallel(module, adamw(module), policy, process_groups(), plan=plan)
    has_it = [sorted(bucket) for bucket in engine.plan] == [sorted(bucket) for bucket in plan]
    for step in range(4):
        train_step(engine, module, engine.optimizers, step)
    keeps_it = engine.plan == plan
    engine.close()
    other = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    rebound = ShardedDataParallel(other, adamw(other), policy, process_groups(), plan=plan)
    own = {name for bucket in rebound.plan for name in bucket} == {name for name, _ in other.named_parameters()}
    rebound.close()
    return has_it, keeps_it, own


def test_a_kept_plan_is_taken_up_where_it_fits(pool: RankPool) -> None:
    assert pool.run(2, resumed, 2) == [(True, True, True)] * 2


def hindered(until: int, by_graph: bool) -> tuple[bool, list[Tensor]]:
    """Whether the plan stays where a view is held on a rank for some steps, or a graph captured; and the parameters."""
    torch.manual_seed(0)
    module = Shuffled()
    (optimizer,) = adamw(module)
    engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(bucket_cap_mb=3e-4), process_groups())
    before = engine.plan
    held = module.second.weight.detach() if dist.get_rank() == 1 and not by_graph else None
    for step in range(STEPS):
        if by_graph and step == 1:
            captured(module.second)
        train_step(engine, module, [optimizer], step)
        held = None if step == until else held
    engine.gatherer.finish()
    if held is not None:
        assert torch.equal(held, module.second.weight) and held.data_ptr() == module.second.weight.data_ptr()
    if by_graph:
        with pytest.raises(ValueError, match="on_train_start"):
            ShardedDataParallel(module, adamw(module), ShardingPolicy(), process_groups())
    return engine.plan == before, [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(("until", "by_graph", "stays"), [(STEPS, False, True), (3, False, False), (STEPS, True, True)])
def test_buckets_stay_as_long_as_a_view_is_held_or_a_graph_reads_them(
    pool: RankPool, until: int, by_graph: bool, stays: bool
) -> None:
    expected, *_ = pool.run(2, train, "adamw", "registration")[0]
    for found, parameters in pool.run(2, hindered, until, by_graph):
        assert found is stays
        assert distance(parameters, expected) == 0


def captured(module: nn.Module) -> None:
    """Does to a module what ``torch.cuda.make_graphed_callables`` does, but for the graph."""
    forward = module.forward

    def graphed(*inputs: Tensor) -> Tensor:
        return forward(*inputs)

    graphed.__module__ = torch.cuda.graphs.make_graphed_callables.__module__
    module.forward = graphed


def accumulated(order: str, exposed: bool, shard_group: Any) -> tuple[list[Tensor], bool]:
    """Gradients that are summed over several reduced backwards, and the plan changes in between."""
    torch.manual_seed(0)
    module = Shuffled()
    (optimizer,) = adamw(module)
    policy = ShardingPolicy(bucket_cap_mb=3e-4, bucket_order=order, shard_group=shard_group)
    engine = ShardedDataParallel(module, [optimizer], policy, process_groups())
    engine.expose_gradients(exposed)
    before = engine.plan
    for step in range(4):
        engine.prepare_forward()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = module(torch.randn(5, 7, generator=generator)).square().mean()
        if step == 0:
            optimizer.zero_grad()
        engine.prepare_backward(loss)
        loss.backward()
    optimizer.step()
    engine.gatherer.finish()
    return [parameter.detach().clone() for parameter in module.parameters()], engine.plan != before


@pytest.mark.parametrize(
    ("world_size", "shard_group", "exposed"), [(2, "all", True), (3, "all", False), (4, 2, False), (4, 2, True)]
)
def test_gradients_that_wait_for_a_step_move_along(
    pool: RankPool, world_size: int, shard_group: Any, exposed: bool
) -> None:
    moved = pool.run(world_size, accumulated, "measured", exposed, shard_group)
    stayed = pool.run(world_size, accumulated, "registration", exposed, shard_group)
    for (parameters, changed), (expected, not_changed) in zip(moved, stayed, strict=True):
        assert changed and not not_changed
        assert distance(parameters, expected) == 0


def bytes_left_of_old_buckets(dtype: torch.dtype) -> int:
    """What the buckets of the first plan still hold, without a garbage collector, after the plan has changed."""
    gc.disable()
    try:
        torch.manual_seed(0)
        module = Shuffled().to(dtype)
        (optimizer,) = adamw(module)
        engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(bucket_cap_mb=3e-4), process_groups())
        old, before = engine.buckets, engine.plan
        for step in range(4):
            train_step(engine, module, [optimizer], step, dtype)
        engine.gatherer.finish()
        assert engine.plan != before and not set(old) & set(engine.buckets)
        tensors = [value for bucket in old for value in vars(bucket).values() if isinstance(value, Tensor)]
        tensors += [slot.shard for bucket in old for slot in bucket.slots if slot.shard is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    finally:
        gc.enable()


def test_nothing_is_held_twice_after_a_new_plan(pool: RankPool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert pool.run(2, bytes_left_of_old_buckets, dtype) == [0, 0]


def with_a_group_taken_out(order: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in module], lr=0.1, momentum=0.9)
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0, bucket_order=order)
    for step in range(4):
        engine.prepare_forward()
        optimizer.zero_grad()
        backward(engine, module(torch.ones(2, 4)).square().sum())
        optimizer.step()
        if step == 0:
            optimizer.param_groups.pop(0)
    engine.gatherer.finish()
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_buckets_stay_where_a_parameter_has_left_its_optimizer(pool: RankPool) -> None:
    measured, registration = (pool.run(2, with_a_group_taken_out, order)[0] for order in ("measured", "registration"))
    assert distance(measured, registration) == 0


class Found(NamedTuple):
    """Of one parameter on one rank, after its state has moved: its name, elements, and what somebody has added."""

    name: str
    changed_hands: bool
    elements: slice
    mine: Tensor | None
    note: Any
    steps: float | None


def with_state_of_one_rank() -> tuple[list[Found], dict[str, slice]]:
    """Rank 1 adds to the state of what it owns, forgets that of one parameter, and notes it before buckets change."""
    torch.manual_seed(0)
    module = Shuffled()
    (optimizer,) = adamw(module)
    engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(bucket_cap_mb=3e-4), process_groups())
    names = {parameter: name for name, parameter in module.named_parameters()}
    for step in range(2):
        train_step(engine, module, [optimizer], step)
    engine.gatherer.finish()
    of_rank_1 = {names[slot.parameter]: slot.elements_of(1) for slot in engine.slots.values()}
    old = dict(engine.slots)
    if dist.get_rank() == 1:
        for slot in engine.slots.values():
            if slot.shard is None or slot.shard_slice is None or slot.shard not in optimizer.state:
                continue
            elements = slot.shard_slice.elements
            added = torch.arange(elements.start + 1, elements.stop + 1, dtype=torch.float64)
            optimizer.state[slot.shard]["mine"] = added.as_strided(slot.shard.shape, slot.shard.stride())
            optimizer.state[slot.shard]["note"] = {"by": ["rank 1"]}
            if names[slot.parameter] == "second.weight":
                del optimizer.state[slot.shard]
    engine.prepare_forward()
    found = []
    for parameter, slot in engine.slots.items():
        if slot.shard is None or slot.shard_slice is None:
            continue
        state = optimizer.state.get(slot.shard, {})
        mine, steps = state.get("mine"), state.get("step")
        flat = None if mine is None else mine.reshape(-1)
        changed = Move(old[parameter], slot).changes_hands
        steps = None if steps is None else steps.item()
        found.append(Found(names[parameter], changed, slot.shard_slice.elements, flat, state.get("note"), steps))
    return found, of_rank_1


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_one_rank_alone_has_of_a_state_reaches_all_who_own_the_parameter_now(
    pool: RankPool, world_size: int
) -> None:
    seen = set[str]()
    for found, of_rank_1 in pool.run(world_size, with_state_of_one_rank):
        for one in found:
            if one.name.startswith(("unused", "frozen")):
                # What nobody has stepped has no state anywhere.
                assert (one.mine, one.note, one.steps) == (None, None, None)
                continue
            if not one.changed_hands:
                continue
            assert one.steps == 2.0
            theirs = of_rank_1[one.name]
            if theirs.start == theirs.stop or one.name == "second.weight":
                assert one.mine is None and one.note is None
                continue
            seen.add(one.name)
            assert one.note == {"by": ["rank 1"]} and one.mine is not None
            # Zeros where another rank should have had it.
            places = range(one.elements.start, one.elements.stop)
            expected = [place + 1.0 if theirs.start <= place < theirs.stop else 0.0 for place in places]
            assert one.mine.tolist() == expected
    assert seen


def entries(value: Any, dtype: torch.dtype | None = None) -> dict[str, _Known]:
    return {"momentum": _Known(torch.float32, None, True), "entry": _Known(dtype, value, False)}


def test_equal_states_have_one_digest_wherever_they_lie_and_others_have_others() -> None:
    values = [
        torch.tensor(3.0),
        torch.tensor(4.0),
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor([3.0]),
        torch.tensor([1j, 2.0]),
        [torch.tensor(3.0)],
        {"a": (torch.tensor(3.0), deque([1, torch.ones(2, dtype=torch.bool)]))},
        3,
        3.0,
        "3",
        None,
    ]
    digests = [_digest(entries(value)) for value in values]
    assert [_digest(entries(copy.deepcopy(value))) for value in values] == digests
    assert len(set(digests)) == len(values) and all(0 < digest < 2**62 for digest in digests)
    assert _digest({}) == 0 != _digest({"momentum": _Known(torch.float32, None, True)})


def agreed(own: dict[int, list[int | None]]) -> list[int]:
    return digests_of_owners(own[dist.get_rank()], make_collectives(process_groups().control, torch.device("cpu")))


def test_owners_agree_or_not_and_who_owns_nothing_has_no_say(pool: RankPool) -> None:
    own: dict[int, list[int | None]] = {
        0: [5, 5, None, 0, 0, None, 2**61],
        1: [5, 6, None, 0, 7, 9, 2**61],
        2: [None, 5, None, None, 7, None, 2**61 + 1],
    }
    assert pool.run(3, agreed, own) == [[5, -1, 0, 0, -1, 9, -1]] * 3
    assert pool.run(3, agreed, {rank: [] for rank in range(3)}) == [[]] * 3


def test_a_scalar_parameters_count_of_steps_stays_where_it_is() -> None:
    for device, moves_as_a_value in (("meta", True), ("cpu", False)):
        parameter = nn.Parameter(torch.tensor(1.0, device=device))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "momentum": torch.zeros_like(parameter)}
        slot: Any = SimpleNamespace(shard=parameter)
        described = _describe(optimizer, Move(slot, slot))
        assert described["momentum"].dtype == torch.float32
        assert (described["step"].dtype is None) == moves_as_a_value


def messages_before_the_third_step(idle: bool) -> int:
    """Small messages that planning anew takes, of a module that fits into one bucket."""
    module = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    engine = make_engine(module, torch.optim.Adam(module.parameters()), bucket_cap_mb=8.0)
    for _ in range(2):
        engine.prepare_forward()
        hidden = torch.ones(2, 4)
        for layer in list(module)[: 2 if idle else 3]:
            hidden = layer(hidden)
        engine.optimizers[0].zero_grad()
        backward(engine, hidden.sum())
        engine.optimizers[0].step()
    before = engine.reducer.control.traffic.small_reductions
    engine.prepare_forward()
    # What is in flight would have modules of the next test ask about their parameters.
    engine.gatherer.finish()
    return engine.reducer.control.traffic.small_reductions - before


def test_one_small_bucket_is_planned_anew_only_to_leave_out_what_is_not_used(pool: RankPool) -> None:
    assert pool.run(2, messages_before_the_third_step, False) == [0, 0]
    # When gradients were ready, whether plans are the same, and whether owners have the same state.
    assert pool.run(2, messages_before_the_third_step, True) == [3, 3]


class Graph(nn.Module):
    """A frozen adjacency matrix of a layout that has no size in bytes, beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adjacency = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(2, 2))


def names_beside_a_frozen_sparse_matrix() -> list[list[str]]:
    module = Graph()
    engine = make_engine(module, torch.optim.SGD([module.weight]), bucket_cap_mb="auto")
    plan = engine.plan
    engine.close()
    return plan


def test_what_is_frozen_does_not_count_for_the_size_of_buckets(pool: RankPool) -> None:
    assert pool.run(1, names_beside_a_frozen_sparse_matrix) == [[["weight"]]]


def planned_anew_between_windows(order: str) -> tuple[list[Tensor], list[bool]]:
    """Micro-batches add up in shards; somebody lets go of a view, that forbids another plan, within a window."""
    torch.manual_seed(0)
    module = Shuffled()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = make_engine(module, optimizer, bucket_cap_mb=3e-4, bucket_order=order)
    assert engine.accumulate_in_shards(True)
    plans = [engine.plan]
    held = module.first.weight.detach()

    def backward_of(number: int, scale: float | None = None) -> None:
        engine.prepare_forward()
        plans.append(engine.plan)
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        engine.prepare_backward(loss := module(inputs).square().mean(), None if scale is None else lambda: scale)
        loss.backward()

    for step in range(4):
        with engine.no_sync():
            backward_of(20 * step)
            if step == 2:
                assert held.isfinite().all()
                del held
            # More often than the replanner tries.
            for number in range(1, 13):
                backward_of(20 * step + number)
        backward_of(20 * step + 13, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    engine.gatherer.finish()
    changes = [one != other for one, other in itertools.pairwise(plans)]
    return [parameter.detach().clone() for parameter in module.parameters()], changes


def test_a_window_ends_with_the_plan_that_it_began_with(pool: RankPool) -> None:
    moved, stayed = (pool.run(2, planned_anew_between_windows, order) for order in ("measured", "registration"))
    for (parameters, changes), (expected, _) in zip(moved, stayed, strict=True):
        # The first forward of the window after the one in which the view was let go of.
        assert [place for place, changed in enumerate(changes) if changed] == [3 * 14]
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)
