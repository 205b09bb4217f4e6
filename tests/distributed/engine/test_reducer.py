"""What backward sends, and what is refused: where the parity of trainings does not look."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.engines import assert_shards_hold, backward, make_engine, mean_gradients, sgd, squared_error
from tests.pool import RankPool


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


# A few samples for each rank.
loss_of = partial(squared_error, shape=(3, 6), target=0.0)


def repeated_backward_adds() -> None:
    rank = dist.get_rank()
    module = layers()
    engine = make_engine(module, sgd(module.parameters()))
    for _ in range(3):
        backward(engine, loss_of(module, rank))
        assert all(parameter.grad is None for parameter in module.parameters())
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, [3 * gradient for gradient in mean_gradients(layers(), loss_of)])


def test_repeated_backward_adds_up(pool: RankPool) -> None:
    pool.run(2, repeated_backward_adds)


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
    engine.reducer.collects_unannounced = True
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, mean_gradients(layers(), loss_of))


def test_a_backward_that_was_not_announced_is_reduced_too(pool: RankPool) -> None:
    pool.run(2, a_backward_that_nobody_announced)


def freeze_on_one_rank() -> None:
    module = layers()
    engine = make_engine(module, sgd(module.parameters()))
    module[1].requires_grad_(dist.get_rank() == 0)
    backward(engine, loss_of(module, dist.get_rank()))
    with pytest.raises(RuntimeError, match="`requires_grad` must be set alike"):
        engine.reducer.finish(engine.buckets)


def test_ranks_that_disagree_about_trainable_parameters_get_an_error_and_do_not_hang(own_pool: RankPool) -> None:
    own_pool.run(2, freeze_on_one_rank)


def untouched_half() -> int:
    """The optimizers of a GAN: a backward touches only one half, and the other half is not sent."""
    one, two = layers(2), layers(3)
    module = nn.ModuleList([one, two])
    engine = make_engine(module, sgd(one.parameters()), sgd(two.parameters()))
    loss: Tensor = loss_of(two, dist.get_rank())
    engine.prepare_backward(loss)
    # What has a graph is not kept with it.
    loss.backward(create_graph=True)
    engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is None for parameter in one.parameters())
    shards = [engine.slots[parameter].shard for parameter in two.parameters()]
    assert all(shard is None or not shard.grad.requires_grad for shard in shards)
    return engine.reducer.collectives.traffic.reduce_scatters


def test_buckets_that_no_rank_touched_are_not_sent(pool: RankPool) -> None:
    assert pool.run(2, untouched_half) == [6, 6]


def sparse_gradient() -> None:
    module = nn.Embedding(10, 6)
    engine = make_engine(module, sgd(module.parameters()))
    module.sparse = True
    with pytest.raises(ValueError, match="sparse=False"):
        backward(engine, module(torch.tensor([1, 2])).sum())


def test_a_sparse_gradient_is_refused(pool: RankPool) -> None:
    pool.run(1, sparse_gradient)
