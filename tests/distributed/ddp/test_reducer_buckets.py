"""Buckets of torch's own DDP change while it trains, to those that were foretold, and gradients stay what they are."""

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.tuning import Caps
from lightning_parstrat.distributed.ddp.backward_clock import BackwardClock
from lightning_parstrat.distributed.ddp.reducer_buckets import DDPBuckets
from tests.comparing import distance
from tests.distributed.engines import squared_error
from tests.pool import RankPool

KIB = 2**10
STEPS = 4
"""A static graph has its final buckets from its third step on."""

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static and unused": {"static_graph": True, "find_unused_parameters": True},
}
CHANGES: tuple[Caps | None, ...] = (
    (4 * KIB,),
    (100, 10 * KIB, 3 * KIB, 8 * KIB),
    None,
    (1,),
    (8 * KIB, 30 * KIB),
    (2**30,),
    None,
)


class Net(nn.Module):
    """Layers are used in another order than that of their registration; one is shared, and one is not used at all."""

    def __init__(self, two_dtypes: bool, has_unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.second = nn.Linear(24, 48)
        self.wide = nn.Linear(48, 40, dtype=torch.float64 if two_dtypes else None)
        self.first = nn.Linear(12, 24)
        self.shared = nn.Linear(40, 40)
        self.unused = nn.Linear(30, 30) if has_unused else None
        self.last = nn.Linear(40, 3, bias=False, dtype=torch.float64 if two_dtypes else None)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).tanh())
        hidden = self.wide(hidden.to(self.wide.weight.dtype)).tanh().float()
        hidden = self.shared(self.shared(hidden).tanh())
        return self.last(hidden.to(self.last.weight.dtype))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in module.parameters()]


def bytes_of_buckets(ddp: DistributedDataParallel) -> list[int]:
    """Those that DDP itself says it has."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged["rebuilt_bucket_sizes"] if logged["has_rebuilt_buckets"] else logged["bucket_sizes"]
    return [int(size) for size in sizes.split(",")]


class Pair:
    """A DDP whose buckets are changed, and an untouched one of the same module."""

    def __init__(self, mode: str, two_dtypes: bool = False, as_view: bool = True, **options: Any) -> None:
        module = Net(two_dtypes, has_unused=mode != "plain")
        options = {"gradient_as_bucket_view": as_view, **MODES[mode], **options}
        self.untouched = DistributedDataParallel(copy.deepcopy(module), **options)
        self.changed = DistributedDataParallel(module, **options)
        self.buckets = DDPBuckets(self.changed)
        self.clock = BackwardClock(self.buckets.parameters, torch.device("cpu"))
        self.steps = 0

    def step(self, send: bool = True) -> bool:
        """Whether both have the same gradients after a step, or after a backward that sends nothing."""
        self.steps += 1
        for ddp in (self.untouched, self.changed):
            self.clock.begin_forward()
            with nullcontext() if send else ddp.no_sync():
                loss = squared_error(ddp, 10 * self.steps + dist.get_rank())
                self.clock.begin_backward()
                loss.backward()
            self.clock.end_backward()
        untouched, changed = gradients(self.untouched), gradients(self.changed)
        return [one is None for one in untouched] == [one is None for one in changed] and distance(
            changed, untouched
        ) == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.untouched.zero_grad(set_to_none)
        self.changed.zero_grad(set_to_none)


class Seen(NamedTuple):
    foretold: list[int]
    actual: list[int]
    same_gradients: bool


def change_buckets(mode: str, two_dtypes: bool) -> list[Seen]:
    # Small enough that the default has several, too.
    pair = Pair(mode, two_dtypes, bucket_cap_mb=10 / KIB)
    seen = []
    for caps in CHANGES:
        pair.buckets.adopt(caps)
        is_same = []
        for _ in range(STEPS):
            is_same.append(pair.step())
            pair.zero_grad()
        ready = pair.clock.timing().ready_seconds
        nbytes = pair.buckets.nbytes
        foretold = [sum(nbytes[index] for index in bucket) for bucket in pair.buckets.assigned(caps, ready)]
        seen.append(Seen(foretold, bytes_of_buckets(pair.changed), all(is_same)))
    return seen


@pytest.mark.parametrize("two_dtypes", [False, True], ids=["one dtype", "two dtypes"])
@pytest.mark.parametrize("mode", MODES)
def test_buckets_become_those_that_were_foretold(pool: RankPool, mode: str, two_dtypes: bool) -> None:
    for rank in pool.run(2, change_buckets, mode, two_dtypes):
        for caps, seen in zip(CHANGES, rank, strict=True):
            assert seen.same_gradients, caps
            assert seen.actual == seen.foretold, caps
        counts = [len(seen.actual) for seen in rank]
        assert counts[2] > 1 and rank[2].actual == rank[-1].actual
        assert counts[3] == max(counts) and len(set(counts)) >= 4


def change_between_backwards(mode: str, as_view: bool, set_to_none: bool) -> list[bool]:
    pair = Pair(mode, as_view=as_view, bucket_cap_mb=10 / KIB)
    # The first backward over a static graph must send.
    is_same = [pair.step()]
    pair.zero_grad(set_to_none)
    for caps in (CHANGES[1], None, CHANGES[0]):
        is_same.append(pair.step(send=False))
        pair.buckets.adopt(caps)
        for send in (True, False, True, True):
            # Nothing is cleared before the last of them.
            is_same.append(pair.step(send))
        pair.zero_grad(set_to_none)
    return is_same


@pytest.mark.parametrize(("as_view", "set_to_none"), [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("mode", ["plain", "unused", "static"])
def test_what_was_accumulated_before_a_change_is_kept(
    pool: RankPool, mode: str, as_view: bool, set_to_none: bool
) -> None:
    assert pool.run(2, change_between_backwards, mode, as_view, set_to_none) == [[True] * 16] * 2


class Watch:
    """A communication hook that does what DDP does, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls = 0
        self.storages: set[StorageWeakRef] = set()

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        self.storages.add(StorageWeakRef(bucket.buffer().untyped_storage()))
        return allreduce_hook(state, bucket)


class Watched(NamedTuple):
    calls: int
    buckets: int
    old_storages: int
    old_that_are_left: int
    same_gradients: bool


def watch_changes(mode: str, as_view: bool) -> list[Watched]:
    pair, watch, seen = Pair(mode, as_view=as_view, bucket_cap_mb=10 / KIB), Watch(), []
    pair.changed.register_comm_hook(pair.changed.process_group, watch.__call__)
    for caps in (None, *CHANGES[:4]):
        old, watch.storages = watch.storages, set()
        if seen:
            pair.buckets.adopt(caps)
        is_same = []
        for _ in range(STEPS):
            # A gradient that nothing clears is moved from the old bucket to the new one.
            pair.zero_grad(set_to_none=False)
            watch.calls = 0
            is_same.append(pair.step())
        buckets = len(bytes_of_buckets(pair.changed))
        left = sum(not storage.expired() for storage in old)
        seen.append(Watched(watch.calls, buckets, len(old), left, all(is_same)))
    return seen


@pytest.mark.parametrize("as_view", [True, False], ids=["as view", "not as view"])
@pytest.mark.parametrize("mode", ["plain", "unused", "static"])
def test_the_old_reducer_is_gone_and_hooks_are_not(pool: RankPool, mode: str, as_view: bool) -> None:
    for rank in pool.run(2, watch_changes, mode, as_view):
        for seen in rank:
            # The old one would call the hook for its own buckets.
            assert seen.calls == seen.buckets
            assert seen.old_that_are_left == 0
            assert seen.same_gradients
        assert all(seen.old_storages > 0 for seen in rank[1:])


def reasons_not_to_change() -> list[str | None]:
    modules = {
        "dense": nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)),
        "sparse": nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)),
        "one parameter": nn.Linear(3, 2, bias=False),
        "one that learns": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)),
    }
    modules["one that learns"][0].bias.requires_grad_(False)
    return [DDPBuckets(DistributedDataParallel(module)).reason_not_to_change() for module in modules.values()]


def test_reasons_not_to_change(pool: RankPool) -> None:
    sparse, one = "there are sparse gradients, which travel by themselves", "there are fewer than two parameters"
    assert pool.run(2, reasons_not_to_change) == [[None, sparse, one, one]] * 2


def describe() -> tuple[list[int], torch.dtype, list[int], list[int]]:
    module = nn.ModuleList([nn.Linear(2, 3), nn.Linear(10, 10, dtype=torch.float64), nn.Linear(1, 1)])
    buckets = DDPBuckets(DistributedDataParallel(module))
    backward = DDPBuckets(DistributedDataParallel(module, find_unused_parameters=True))
    ready = [1.0, 2.0, 5.0, 3.0, 0.0, 0.5]
    return buckets.nbytes, buckets.dtype, buckets.order(ready), backward.order(ready)


def test_order_is_that_of_the_dtype_with_most_bytes(pool: RankPool) -> None:
    assert pool.run(2, describe) == [([24, 12, 800, 80, 4, 4], torch.float64, [3, 2], [3, 2])] * 2
