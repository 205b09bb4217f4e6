"""How many buckets of gradients are on their way at once, and for how long their memory is held."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.comm.backends import NativeCollectives
from lightning_parstrat.distributed.comm.collectives import PairwiseCollectives
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.distributed.engines import (
    Log,
    LoggedCollectives,
    backward,
    log_reductions,
    make_engine,
    perceptron,
    sgd,
    squared_error,
)
from tests.pool import RankPool


def net(layers: int = 6, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def most_in_flight(bound: int | None) -> int:
    module = net()
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), max_inflight_buckets=bound)
    log: Log = []
    log_reductions(engine, log)
    backward(engine, module(torch.ones(2, 8)).sum())
    most = current = 0
    for event, _ in log:
        current += {"launch reduce": 1, "wait reduce": -1}.get(event, 0)
        most = max(most, current)
    return most


def test_no_more_are_on_the_way_than_allowed(pool: RankPool) -> None:
    for bound, expected in ((None, 6), (1, 1), (2, 2), (5, 5), (7, 6)):
        assert pool.run(2, most_in_flight, bound) == [expected] * 2


class Watched(PairwiseCollectives):
    """Knows which buffers and shards that were handed to it, and which works it returned, are still there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffers: list[weakref.ref[Tensor]] = []
        self.shards: list[weakref.ref[Tensor]] = []
        self.works: list[weakref.ref[Any]] = []

    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Any) -> Work:
        self.buffers.append(weakref.ref(buffer))
        self.shards.append(weakref.ref(shard))
        work = super()._reduce_scatter(buffer, shard, bounds)
        self.works.append(weakref.ref(work))
        return work


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def there(references: list[weakref.ref[Any]]) -> list[Any]:
    return [one for reference in references if (one := reference()) is not None]


def watched_engine(module: nn.Module) -> tuple[ShardedDataParallel, Watched]:
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1))
    watched = engine.reducer.collectives = Watched(engine.reducer.collectives.group)
    return engine, watched


def buffers_left() -> int:
    # Smaller ones are summed by whoever waits for them.
    width = 400
    module = net(width=width)
    engine, watched = watched_engine(module)
    backward(engine, module(torch.ones(2, width)).sum())
    assert len(watched.buffers) == 6
    wait_until(lambda: not there(watched.buffers))
    left = len(there(watched.buffers))
    engine.reducer.complete()
    return left


def test_memory_goes_when_a_bucket_has_arrived_not_when_it_is_waited_for(pool: RankPool) -> None:
    assert pool.run(2, buffers_left) == [0, 0]


class WatchedNative(NativeCollectives):
    """Knows how many of the buffers that were handed to it were there at once, on a wire faster than backward."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffers: list[weakref.ref[Tensor]] = []
        self.most = 0

    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Any) -> Work:
        self.buffers.append(weakref.ref(buffer))
        self.most = max(self.most, len(there(self.buffers)))
        work = super()._reduce_scatter(buffer, shard, bounds)
        wait_until(work.is_completed)
        return work


def most_buffers_held() -> int:
    module = net(12)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer, max_inflight_buckets=2, reduce_dtype="bf16")
    watched = engine.reducer.collectives = WatchedNative(engine.reducer.collectives.group)
    backward(engine, module(torch.ones(2, 8)).sum())
    engine.reducer.complete()
    assert len(watched.buffers) == 12
    return watched.most


def test_what_has_arrived_is_let_go_of_by_collectives_that_sum_when_waited_for(pool: RankPool) -> None:
    assert all(most <= 2 for most in pool.run(2, most_buffers_held))


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
