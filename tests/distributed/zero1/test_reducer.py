"""What backward sends, when, and in which order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.engines import (
    Log,
    assert_shards_hold,
    backward,
    log_reductions,
    make_engine,
    mean_gradients,
    sgd,
    squared_error,
)
from tests.pool import RankPool


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


# A few samples for each rank.
loss_of = partial(squared_error, shape=(3, 6), target=0.0)


def events_of_one_backward() -> tuple[Log, int]:
    module = layers()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    log: Log = []
    log_reductions(engine, log)
    # The gradient of the input's first layer is the last thing backward computes.
    module[0].weight.register_post_accumulate_grad_hook(lambda _: log.append(("last gradient", 0)))
    backward(engine, loss_of(module, dist.get_rank()))
    log.append(("backward ended", 0))
    optimizer.step()
    return log, len(engine.buckets)


def test_every_bucket_but_the_last_leaves_during_backward_and_none_is_waited_for(pool: RankPool) -> None:
    for log, buckets in pool.run(2, events_of_one_backward):
        assert buckets == 8
        ended = log.index(("backward ended", 0))
        launches = [number for event, number in log if event == "launch reduce"]
        assert launches == list(range(buckets))
        before_last_gradient = log[: log.index(("last gradient", 0))]
        assert sum(event == "launch reduce" for event, _ in before_last_gradient) >= buckets - 1
        assert not any(event.startswith("wait") for event, _ in log[:ended])
        assert sum(event == "wait reduce" for event, _ in log[ended:]) == buckets


class Reentrant(nn.Module):
    """A block used three times, within reentrant checkpoints: its gradients come in parts, in inner graph tasks."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = layers(2)
        self.other = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone().requires_grad_(True)
        for block in (self.body, self.other, self.body, self.body):
            hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self.use_reentrant))
        return hidden


class Routed(nn.Module):
    """Each rank uses its own expert; one expert nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.trunk = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[int(inputs[0, 0].abs() * 10) % 4](self.trunk(inputs))


def make_reentrant() -> nn.Module:
    torch.manual_seed(1)
    return Reentrant(use_reentrant=True)


def make_checkpointed() -> nn.Module:
    torch.manual_seed(1)
    return Reentrant(use_reentrant=False)


def make_routed() -> nn.Module:
    torch.manual_seed(1)
    return Routed()


def gradients_reach_their_owners(make: Callable[[], nn.Module], cap: float, backwards: int) -> None:
    rank = dist.get_rank()
    reference, module = make(), make()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=cap)
    for _ in range(backwards):
        optimizer.zero_grad()
        backward(engine, loss_of(module, rank))
        assert all(parameter.grad is None for parameter in module.parameters())
        engine.reducer.finish(engine.buckets)
        assert_shards_hold(engine, module, mean_gradients(reference, loss_of))


def gradients_of_all_kinds_reach_their_owners() -> None:
    for make in (layers, make_reentrant, make_checkpointed, make_routed):
        for cap in (1e-6, 1.0):
            # Five backwards: from the fourth on, what was never used is not waited for.
            gradients_reach_their_owners(make, cap, 5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_get_the_mean_gradient(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, gradients_of_all_kinds_reach_their_owners)


def repeated_backward_adds() -> None:
    rank = dist.get_rank()
    module = layers()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    for _ in range(3):
        backward(engine, loss_of(module, rank))
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, [3 * gradient for gradient in mean_gradients(layers(), loss_of)])


def test_repeated_backward_adds_up(pool: RankPool) -> None:
    pool.run(2, repeated_backward_adds)


def accumulation_sends_nothing() -> None:
    rank = dist.get_rank()
    module = layers()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    of_the_plan = engine.reducer.control.traffic.small_reductions
    with engine.no_sync():
        for _ in range(2):
            backward(engine, loss_of(module, rank))
    traffic = engine.reducer.collectives.traffic
    assert traffic.reduce_scatters == 0 and engine.reducer.control.traffic.small_reductions == of_the_plan
    assert all(parameter.grad is not None for parameter in module.parameters())
    backward(engine, loss_of(module, rank))
    engine.reducer.finish(engine.buckets)
    assert traffic.reduce_scatters == len(engine.buckets)
    assert_shards_hold(engine, module, [3 * gradient for gradient in mean_gradients(layers(), loss_of)])


def test_accumulation_is_local_until_the_last_micro_batch(pool: RankPool) -> None:
    pool.run(2, accumulation_sends_nothing)


def a_backward_that_nobody_announced() -> None:
    module = layers()
    engine = make_engine(module, sgd(module.parameters()))
    rank = dist.get_rank()
    # Each rank knows alone how often it calls backward, so that none may wait for another before the step.
    losses = 1 + rank
    for _ in range(losses):
        (loss_of(module, rank) / losses).backward()
    engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is not None for parameter in module.parameters())
    engine.collect_unannounced_gradients(True)
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, mean_gradients(layers(), loss_of))


def test_a_backward_that_was_not_announced_is_reduced_too(pool: RankPool) -> None:
    pool.run(2, a_backward_that_nobody_announced)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("backward failed")


def the_step_after_an_exception() -> None:
    rank = dist.get_rank()
    module = layers()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    failing = module[3](module[2](Failing.apply(module[1](module[0](torch.ones(3, 6)))))).pow(2).mean()
    with pytest.raises(RuntimeError, match="backward failed"):
        backward(engine, failing)
    optimizer.zero_grad()
    backward(engine, loss_of(module, rank))
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, mean_gradients(layers(), loss_of))


def test_an_exception_in_backward_leaves_nothing_behind(pool: RankPool) -> None:
    pool.run(2, the_step_after_an_exception)


def freeze_on_one_rank() -> str:
    module = layers()
    engine = make_engine(module, sgd(module.parameters()))
    module[1].requires_grad_(dist.get_rank() == 0)
    backward(engine, loss_of(module, dist.get_rank()))
    try:
        engine.reducer.finish(engine.buckets)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_disagree_about_trainable_parameters_get_an_error_and_do_not_hang(own_pool: RankPool) -> None:
    for message in own_pool.run(2, freeze_on_one_rank):
        assert "requires_grad" in message


def untouched_half() -> int:
    """The optimizers of a GAN: a backward touches only one half, and the other half is not sent."""
    one, two = layers(2), layers(3)
    module = nn.ModuleList([one, two])
    engine = make_engine(module, sgd(one.parameters()), sgd(two.parameters()))
    backward(engine, loss_of(two, dist.get_rank()))
    engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is None for parameter in one.parameters())
    return engine.reducer.collectives.traffic.reduce_scatters


def test_buckets_that_no_rank_touched_are_not_sent(pool: RankPool) -> None:
    assert pool.run(2, untouched_half) == [6, 6]


def sparse_gradient() -> str:
    module = nn.Embedding(10, 6)
    engine = make_engine(module, sgd(module.parameters()))
    module.sparse = True
    loss = module(torch.tensor([1, 2])).sum()
    engine.prepare_backward(loss)
    try:
        loss.backward()
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sparse_gradient_is_refused(pool: RankPool) -> None:
    assert "sparse=False" in pool.run(1, sparse_gradient)[0]


def create_graph() -> None:
    module = layers(2)
    engine = make_engine(module, sgd(module.parameters()))
    loss = loss_of(module, dist.get_rank())
    engine.prepare_backward(loss)
    loss.backward(create_graph=True)
    engine.reducer.finish(engine.buckets)
    shards = [slot.shard for bucket in engine.buckets for slot in bucket.slots if slot.shard is not None]
    assert all(shard.grad is not None and not shard.grad.requires_grad for shard in shards)


def test_gradients_with_a_graph_are_detached(pool: RankPool) -> None:
    pool.run(2, create_graph)
