"""What backward does not send, and ranks that disagree about what is trained."""

from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.engines import backward, layers, make_engine, sgd, squared_error
from tests.pool import RankPool

# A few samples for each rank.
loss_of = partial(squared_error, shape=(3, 6), target=0.0)


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
    reduce = engine.reducer.collectives.reduce_scatter
    with mock.patch.object(engine.reducer.collectives, "reduce_scatter", side_effect=reduce) as sent:
        # What has a graph is not kept with it.
        loss.backward(create_graph=True)
        engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is None for parameter in one.parameters())
    shards = [engine.slots[parameter].shard for parameter in two.parameters()]
    assert all(shard is None or not shard.grad.requires_grad for shard in shards)
    return sent.call_count


def test_buckets_that_no_rank_touched_are_not_sent(pool: RankPool) -> None:
    assert pool.run(2, untouched_half) == [6, 6]
