"""Micro-batches that are reduced one by one come to the same as those that accumulate on every rank first."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.accounting import traffic_of
from tests.comparing import distance
from tests.distributed.engines import Log, adamw, backward, log_reductions, make_engine, sgd, squared_error
from tests.pool import RankPool

loss_of = partial(squared_error, shape=(3, 6))


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(dtype)


class Routed(nn.Module):
    """Each rank uses its own expert in each micro-batch; one expert nobody uses, one is outside every optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.trunk = nn.Linear(6, 6)
        self.outside = nn.Linear(6, 6)
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outside(self.experts[int(inputs[0, 0].abs() * 10) % 4](self.trunk(inputs)))

    def sharded(self) -> list[nn.Parameter]:
        return [*self.experts.parameters(), *self.trunk.parameters()]


def sharded_engine(module: nn.Module, optimizer: Optimizer, in_shards: bool = True, **policy: Any) -> Any:
    engine = make_engine(module, optimizer, **policy)
    # One rank's shard is the whole.
    assert engine.accumulate_in_shards(in_shards) == (in_shards and dist.get_world_size() > 1)
    return engine


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return module.sharded() if isinstance(module, Routed) else list(module.parameters())


def window(engine: ShardedDataParallel, losses: Sequence[Callable[[], Tensor]], scale: float | None = None) -> None:
    """Runs backwards; the last one's gradients come with those of the others."""
    *first, last = losses
    with engine.no_sync():
        for loss in first:
            backward(engine, loss())
    final = last()
    engine.prepare_backward(final, None if scale is None else lambda: scale)
    final.backward()


def events_of_a_window(micro_batches: int, in_shards: bool) -> tuple[Log, int, int]:
    module = layers()
    optimizer = sgd(module.parameters())
    engine = sharded_engine(module, optimizer, in_shards)
    log: Log = []
    log_reductions(engine, log)
    module[0].weight.register_post_accumulate_grad_hook(lambda _: log.append(("last gradient", 0)))

    def loss(number: int) -> Tensor:
        log.append(("forward", number))
        return loss_of(module, number)

    window(engine, [partial(loss, number) for number in range(micro_batches)])
    log.append(("forward", micro_batches))
    before = engine.gatherer.collectives.traffic.all_gathers
    optimizer.step()
    engine.gatherer.finish()
    return log, len(engine.buckets), engine.gatherer.collectives.traffic.all_gathers - before


def test_every_micro_batch_leaves_while_its_backward_runs(pool: RankPool) -> None:
    micro_batches = 3
    for log, buckets, gathers in pool.run(2, events_of_a_window, micro_batches, True):
        launched = [event for event in log if event[0] == "launch reduce"]
        assert len(launched) == micro_batches * buckets and gathers == buckets == 8
        begins = [log.index(("forward", number)) for number in range(micro_batches + 1)]
        for start, stop in pairwise(begins):
            backward_of_one = log[start:stop]
            last = backward_of_one.index(("last gradient", 0))
            # All but the last bucket are on their way before the last gradient is there, and none was waited for.
            names = [event for event, _ in backward_of_one]
            first_launch = names.index("launch reduce")
            assert names[:last].count("launch reduce") >= buckets - 1
            assert names[first_launch:].count("launch reduce") == buckets
            assert "wait reduce" not in names[first_launch:]


def test_without_accumulation_the_same_is_launched(pool: RankPool) -> None:
    assert pool.run(2, events_of_a_window, 1, True) == pool.run(2, events_of_a_window, 1, False)


def traffic_of_a_window(in_shards: bool, dtype: torch.dtype) -> bool:
    module = layers(dtype)
    optimizer = sgd(module.parameters())
    # Of whole parameters the sums travel, too, to who owns them.
    policy = {"partition": "parameter", "bucket_cap_mb": 2e-4} if dtype is torch.bfloat16 else {}
    engine = sharded_engine(module, optimizer, in_shards, master_weights=False, **policy)
    window(engine, [lambda: loss_of(module, 0)] * 4)
    optimizer.step()
    engine.gatherer.finish()
    sent, formula = engine.traffic, traffic_of(engine, 4)
    # To itself a rank sends nothing.
    return all(getattr(sent, name) == value for name, value in formula._asdict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_shards", [True, False])
def test_bytes_are_those_of_the_formula(pool: RankPool, in_shards: bool, dtype: torch.dtype) -> None:
    assert pool.run(3, traffic_of_a_window, in_shards, dtype) == [True] * 3


def messages_of_a_window(in_shards: bool) -> tuple[int, int]:
    module = layers()
    engine = sharded_engine(module, sgd(module.parameters()), in_shards)
    before = engine.reducer.control.traffic.small_reductions
    window(engine, [lambda: loss_of(module, 0)] * 3)
    engine.reducer.finish(engine.buckets)
    sent = engine.reducer.collectives.traffic.reduce_scatters
    return sent // len(engine.buckets), engine.reducer.control.traffic.small_reductions - before


def test_a_message_goes_with_every_micro_batch(pool: RankPool) -> None:
    assert pool.run(2, messages_of_a_window, True) == [(3, 3)] * 2
    assert pool.run(2, messages_of_a_window, False) == [(1, 1)] * 2


def trained(make: Callable[..., nn.Module], make_optimizer: Any, dtype: torch.dtype, in_shards: bool) -> list[Tensor]:
    module = make(dtype)
    optimizer = make_optimizer(parameters_of(module))
    engine = sharded_engine(module, optimizer, in_shards, bucket_cap_mb=2e-4)
    rank = dist.get_rank()
    # Short windows, also of one micro-batch, with scales as tokens or an epoch's end make them.
    for step, (length, scale) in enumerate([(3, None), (4, 0.3), (1, None), (2, 1 / 3), (3, 0.0), (3, 0.7)]):
        optimizer.zero_grad(set_to_none=step % 3 != 1)
        module.zero_grad()
        numbers = range(100 * step + 10 * rank, 100 * step + 10 * rank + length)
        window(engine, [partial(loss_of, module, number) for number in numbers], scale)
        optimizer.step()
        if isinstance(module, Routed):
            outside = [parameter for parameter in module.outside.parameters() if parameter.grad is not None]
            assert len(outside) == 2
            for parameter in outside:
                parameter.data.sub_(parameter.grad, alpha=0.1)
    engine.gatherer.finish()
    engine.close()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("make", [layers, Routed])
@pytest.mark.parametrize("make_optimizer", [sgd, pytest.param(adamw, marks=pytest.mark.slow)])
def test_windows_equal_those_that_accumulate_in_full(
    pool: RankPool, make: Any, make_optimizer: Any, world_size: int
) -> None:
    dtype = torch.float32 if world_size == 1 else torch.float64
    full = pool.run(world_size, trained, make, make_optimizer, dtype, False)
    in_shards = pool.run(world_size, trained, make, make_optimizer, dtype, True)
    # Alone, sums are in the same order: to the last bit.
    assert distance(in_shards, full) <= (0 if world_size == 1 else 1e-12)
    # It has trained.
    assert distance(in_shards[0], list(make(dtype).parameters())) > 1e-2


def of_whole_numbers(in_shards: bool) -> list[Tensor]:
    """Gradients of a sum by weights and inputs that are small whole numbers: exact in any order."""
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for parameter in module.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=torch.Generator().manual_seed(1)).float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = sharded_engine(module, optimizer, in_shards)
    draw = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randint(-4, 5, (3, 6), generator=draw).float() for _ in range(3)]
    window(engine, [lambda one=one: module(one).sum() for one in inputs], 1 / 3)
    optimizer.step()
    engine.gatherer.finish()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_where_no_sum_rounds_nothing_differs(pool: RankPool, world_size: int) -> None:
    assert distance(pool.run(world_size, of_whole_numbers, True), pool.run(world_size, of_whole_numbers, False)) == 0


def small_numbers(dtype: torch.dtype, masters: Any, zeroed_in_place: bool) -> tuple[list[float], torch.dtype]:
    """A large gradient, then many that are lost in 16 bits each by itself."""
    module = nn.Linear(256, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = sharded_engine(module, optimizer, master_weights=masters)
    if zeroed_in_place:
        window(engine, [lambda: module(torch.ones(1, 256, dtype=dtype)).sum()] * 2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    inputs = [torch.full((1, 256), value, dtype=dtype) for value in (1.0, *[2.0**-11] * 64)]
    window(engine, [lambda one=one: module(one).sum() for one in inputs])
    engine.reducer.finish(engine.buckets)
    shards = [slot.shard.grad for bucket in engine.buckets for slot in bucket.slots if slot.shard is not None]
    return [number for shard in shards for number in shard.float().reshape(-1).tolist()], shards[0].dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", ["auto", False])
@pytest.mark.parametrize("zeroed_in_place", [False, True])
def test_16_bits_add_up_in_32(pool: RankPool, dtype: torch.dtype, masters: Any, zeroed_in_place: bool) -> None:
    for numbers, kept_in in pool.run(2, small_numbers, dtype, masters, zeroed_in_place):
        assert numbers == [1.0 + 2.0**-5] * 128
        assert kept_in == (torch.float32 if masters == "auto" else dtype)


def after_an_abandoned_window(how: str, in_shards: bool) -> list[Tensor]:
    module = layers(torch.float64)
    optimizer = sgd(module.parameters())
    engine = sharded_engine(module, optimizer, in_shards)
    rank = dist.get_rank()
    with engine.no_sync():
        backward(engine, loss_of(module, rank))
        if how == "zeroed":
            optimizer.zero_grad()
        elif how == "zeroed in place":
            optimizer.zero_grad(set_to_none=False)
        elif how == "left over":
            # Steps what its micro-batches have left, without a last one.
            engine.collect_unannounced_gradients(True)
            backward(engine, loss_of(module, 10 + rank))
            optimizer.step()
            optimizer.zero_grad()
        elif how == "unannounced":
            (loss_of(module, 20 + rank) * 0.5).backward()
        elif how == "given back":
            engine.give_back_accumulated()
        else:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    window(engine, [lambda: loss_of(module, 30 + rank), lambda: loss_of(module, 40 + rank)], 0.4)
    optimizer.step()
    engine.gatherer.finish()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "how", ["zeroed", "zeroed in place", "left over", "unannounced", "given back", "a parameter more"]
)
def test_a_window_in_whose_middle_something_happens(pool: RankPool, how: str) -> None:
    full = pool.run(2, after_an_abandoned_window, how, False)
    in_shards = pool.run(2, after_an_abandoned_window, how, True)
    assert distance(in_shards, full) <= 1e-12


def looks_in_the_middle(factor: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What ``full_gradients()`` shows in a window, and at its end, where it was changed; and what it should."""
    module = layers(torch.float64)
    engine = sharded_engine(module, sgd(module.parameters()))
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    with engine.no_sync():
        backward(engine, loss_of(module, rank))
        with engine.full_gradients():
            shown = [parameter.grad.clone() for parameter in module.parameters()]
            for parameter in module.parameters():
                parameter.grad.mul_(factor)
    assert all(parameter.grad is None for parameter in module.parameters())
    backward(engine, loss_of(module, 10 + rank))
    with engine.full_gradients():
        ended = [parameter.grad.clone() for parameter in module.parameters()]
    expected = []
    for offset in (0, 10):
        module.zero_grad()
        (sum(loss_of(module, offset + one) for one in ranks) / len(ranks)).backward()
        expected.append([parameter.grad.clone() for parameter in module.parameters()])
    middle, end = expected
    return shown, ended, [*middle, *(factor * one + other for one, other in zip(middle, end, strict=True))]


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_what_was_accumulated_can_be_looked_at_and_changed(pool: RankPool, factor: float) -> None:
    for shown, ended, expected in pool.run(2, looks_in_the_middle, factor):
        assert distance([*shown, *ended], expected) <= 1e-12


def decided(wanted: list[bool], exposed: bool) -> bool:
    module = layers()
    engine = make_engine(module, sgd(module.parameters()))
    engine.expose_gradients(exposed)
    return engine.accumulate_in_shards(wanted[dist.get_rank()])


@pytest.mark.parametrize(
    ("wanted", "exposed", "expected"),
    [([True, True], False, True), ([True, False], False, False), ([True, True], True, False)],
)
def test_all_ranks_must_want_it_and_none_may_look(
    pool: RankPool, wanted: list[bool], exposed: bool, expected: bool
) -> None:
    assert pool.run(2, decided, wanted, exposed) == [expected] * 2


def at_random(seed: int, in_shards: bool) -> list[Tensor]:
    """The same operations on all ranks, drawn from one generator."""
    draw = random.Random(seed)
    module = Routed(torch.float64)
    first, second = module.sharded()[:6], module.sharded()[6:]
    optimizers = [sgd(first), adamw(second)]
    engine = make_engine(
        module,
        *optimizers,
        bucket_cap_mb=draw.choice([1e-6, 4e-4, 1.0]),
        max_inflight_buckets=draw.choice([None, 1]),
        partition=draw.choice(["element", "parameter"]),
    )
    engine.collect_unannounced_gradients(True)
    engine.accumulate_in_shards(in_shards)
    for step in range(8):
        engine.prepare_forward()
        if draw.random() < 0.2:
            module.trunk.requires_grad_(draw.random() < 0.5)
        for number in range(draw.randrange(4)):
            with engine.no_sync():
                backward(engine, loss_of(module, 100 * step + 10 * number + dist.get_rank()))
            if draw.random() < 0.1:
                draw.choice(optimizers).zero_grad(set_to_none=draw.random() < 0.5)
        # Alike where something of an earlier window may be left: as in manual optimization.
        if draw.random() < 0.8:
            backward(engine, loss_of(module, 100 * step + 90 + dist.get_rank()))
        for optimizer in draw.sample(optimizers, draw.choice([1, 2])):
            optimizer.step()
            if draw.random() < 0.8:
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    engine.gatherer.finish()
    return [parameter.detach().clone() for parameter in module.parameters()]


def random_differences(seeds: range) -> list[float]:
    return [distance(at_random(seed, True), at_random(seed, False)) for seed in seeds]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 30), marks=pytest.mark.slow)], ids=["few", "many"])
def test_windows_at_random(pool: RankPool, world_size: int, seeds: range) -> None:
    for differences in pool.run(world_size, random_differences, seeds):
        assert max(differences) <= 1e-9, differences
