"""Messages of a backward, and when they are sent; transfers in flight together; ranks that disagree."""

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from tests.distributed.engines import (
    Log,
    LoggedCollectives,
    backward,
    layers,
    log_reductions,
    make_engine,
    perceptron,
    sgd,
    squared_error,
)
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
        engine.end_backward()
        engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is None for parameter in one.parameters())
    shards = [engine.slots[parameter].shard for parameter in two.parameters()]
    assert all(shard is None or not shard.grad.requires_grad for shard in shards)
    return sent.call_count


def test_buckets_that_no_rank_touched_are_not_sent(pool: RankPool) -> None:
    assert pool.run(2, untouched_half) == [6, 6]


class _Of:
    """A part of a log, of one process group."""

    def __init__(self, group: str, log: list[tuple[str, str, int]]) -> None:
        self._group, self._log = group, log

    def append(self, entry: tuple[str, int]) -> None:
        self._log.append((self._group, *entry))


def by_turns(plays: list[str], policy: dict[str, Any], in_shards: bool, exposed: bool) -> list[tuple[str, str, int]]:
    """Two optimizers, as of a GAN; ``plays`` says whose backward (lower case) or step (upper case) comes next."""
    modules = {"a": perceptron(), "b": perceptron()}
    both = nn.ModuleDict(modules)
    optimizers = {name: sgd(module.parameters()) for name, module in modules.items()}
    engine = make_engine(both, *optimizers.values(), bucket_cap_mb=5e-4, **policy)
    engine.expose_gradients(exposed)
    engine.accumulate_in_shards(in_shards)
    log: list[tuple[str, str, int]] = []
    for name, mover in (("gradients", engine.reducer), ("parameters", engine.gatherer)):
        mover.collectives = LoggedCollectives(mover.collectives.group, _Of(name, log))  # type: ignore[arg-type]
    for number, turn in enumerate(plays * 3):
        if turn == "-":
            with engine.reducer.no_sync():
                backward(engine, squared_error(both["a"], number))
        elif turn.islower():
            backward(engine, squared_error(both[turn], number))
        else:
            optimizers[turn.lower()].step()
            optimizers[turn.lower()].zero_grad()
    engine.close()
    return log


TURNS: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("aA", {}, False, False),
    ("aAbB", {}, False, False),
    ("abAB", {}, False, False),
    ("abBA", {}, False, False),
    ("abAB", {"max_inflight_buckets": 1}, False, False),
    ("--aA", {}, False, False),
    ("--aA", {}, True, False),
    ("aAbB", {}, False, True),
]


def test_gradients_and_parameters_are_never_in_flight_together(pool: RankPool) -> None:
    """Of two communicators torch asks that what one has launched is waited for before the other is used."""
    for plays, policy, in_shards, exposed in TURNS:
        logs = pool.run(2, by_turns, list(plays), policy, in_shards, exposed)
        launches = [[entry for entry in log if entry[1].startswith("launch")] for log in logs]
        assert launches[0] == launches[1] and {group for group, *_ in launches[0]} == {"gradients", "parameters"}
        for log in logs:
            in_flight: set[tuple[str, int]] = set()
            for group, event, number in log:
                if event.startswith("launch"):
                    assert all(other == group for other, _ in in_flight), (plays, policy)
                    in_flight.add((group, number))
                else:
                    in_flight.discard((group, number))


def events_of_a_window(micro_batches: int, in_shards: bool) -> tuple[Log, tuple[int, int, int]]:
    """What was launched and waited for; and buckets, gathers and messages."""
    module = layers()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    engine.accumulate_in_shards(in_shards)
    log: Log = []
    log_reductions(engine, log)
    # The gradient of the input's first layer is the last thing backward computes.
    module[0].weight.register_post_accumulate_grad_hook(lambda _: log.append(("last gradient", 0)))
    group = engine.reducer.control.group
    messages = small_reductions_of(group)
    for number in range(micro_batches):
        log.append(("forward", number))
        with engine.reducer.no_sync() if number < micro_batches - 1 else nullcontext():
            backward(engine, loss_of(module, number))
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
