"""Micro-batches that are reduced one by one come to what one process makes of all of them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.comparing import distance
from tests.distributed.engines import Log, backward, layers, log_reductions, make_engine, sgd, squared_error
from tests.pool import RankPool

loss_of = partial(squared_error, shape=(3, 6))


def sharded_engine(module: nn.Module, optimizer: Optimizer, in_shards: bool = True, **policy: Any) -> Any:
    engine = make_engine(module, optimizer, **policy)
    engine.accumulate_in_shards(in_shards)
    return engine


def window(engine: ShardedDataParallel, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Runs backwards; the last one's gradients come with those of the others."""
    *first, last = losses
    with engine.reducer.no_sync():
        for loss in first:
            backward(engine, loss())
    backward(engine, last())


def events_of_a_window(micro_batches: int, in_shards: bool) -> tuple[Log, tuple[int, int, int]]:
    """What was launched and waited for; and buckets, gathers and messages."""
    module = layers()
    optimizer = sgd(module.parameters())
    engine = sharded_engine(module, optimizer, in_shards)
    log: Log = []
    log_reductions(engine, log)
    # The gradient of the input's first layer is the last thing backward computes.
    module[0].weight.register_post_accumulate_grad_hook(lambda _: log.append(("last gradient", 0)))

    def loss(number: int) -> Tensor:
        log.append(("forward", number))
        return loss_of(module, number)

    group = engine.reducer.control.group
    messages = small_reductions_of(group)
    window(engine, [partial(loss, number) for number in range(micro_batches)])
    log.append(("forward", micro_batches))
    gather = engine.gatherer.collectives.all_gather
    with mock.patch.object(engine.gatherer.collectives, "all_gather", side_effect=gather) as gathers:
        optimizer.step()
    engine.gatherer.finish()
    return log, (len(engine.buckets), gathers.call_count, small_reductions_of(group) - messages)


def test_every_bucket_leaves_in_its_order_while_backward_runs_and_none_is_waited_for(pool: RankPool) -> None:
    for micro_batches, in_shards in ((3, True), (3, False), (1, False)):
        sending = micro_batches if in_shards else 1
        for log, (buckets, gathers, messages) in pool.run(2, events_of_a_window, micro_batches, in_shards):
            launched = [number for event, number in log if event == "launch reduce"]
            assert launched == list(range(sending * buckets)) and gathers == buckets == 8 and messages == sending
            begins = [log.index(("forward", number)) for number in range(micro_batches + 1)]
            for start, stop in list(pairwise(begins))[-sending:]:
                names = [event for event, _ in log[start:stop]]
                first_launch = names.index("launch reduce")
                # All but the last bucket are on their way before the last gradient is there, and none was waited for.
                assert names[: names.index("last gradient")].count("launch reduce") >= buckets - 1
                assert names[first_launch:].count("launch reduce") == buckets
                assert "wait reduce" not in names[first_launch:]
    # Without accumulation both are the same.
    assert pool.run(2, events_of_a_window, 1, True) == pool.run(2, events_of_a_window, 1, False)


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


def test_16_bits_add_up_in_32(pool: RankPool) -> None:
    for dtype, masters, zeroed_in_place in ((torch.bfloat16, "auto", False), (torch.float16, False, True)):
        for numbers, kept_in in pool.run(2, small_numbers, dtype, masters, zeroed_in_place):
            assert numbers == [1.0 + 2.0**-5] * 128
            assert kept_in == (torch.float32 if masters == "auto" else dtype)


def looks_in_the_middle(factor: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What ``full_gradients()`` shows in a window, and at its end, where it was changed; and what it should."""
    module = layers().double()
    engine = sharded_engine(module, sgd(module.parameters()))
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    with engine.reducer.no_sync():
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


def test_what_was_accumulated_can_be_looked_at_and_changed(pool: RankPool) -> None:
    for shown, ended, expected in pool.run(2, looks_in_the_middle, -0.5):
        assert distance([*shown, *ended], expected) <= 1e-12
