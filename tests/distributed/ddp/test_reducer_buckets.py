"""Buckets of torch's own DDP change while it trains, and gradients stay what they are."""

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.tuning import Caps
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
        self.steps = 0

    def step(self, send: bool = True) -> bool:
        """Whether both have the same gradients after a step, or after a backward that sends nothing."""
        self.steps += 1
        for ddp in (self.untouched, self.changed):
            with nullcontext() if send else ddp.no_sync():
                squared_error(ddp, 10 * self.steps + dist.get_rank()).backward()
        untouched, changed = gradients(self.untouched), gradients(self.changed)
        return [one is None for one in untouched] == [one is None for one in changed] and distance(
            changed, untouched
        ) == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.untouched.zero_grad(set_to_none)
        self.changed.zero_grad(set_to_none)


def change_buckets(mode: str, two_dtypes: bool) -> list[tuple[list[int], bool]]:
    """After each change the buckets, and whether gradients were the same."""
    # Small enough that the default has several, too.
    pair = Pair(mode, two_dtypes, bucket_cap_mb=10 / KIB)
    seen = []
    for caps in CHANGES:
        pair.buckets.adopt(caps)
        is_same = []
        for _ in range(STEPS):
            is_same.append(pair.step())
            pair.zero_grad()
        seen.append((bytes_of_buckets(pair.changed), all(is_same)))
    return [*seen, (bytes_of_buckets(pair.untouched), True)]


def change_in_all_modes() -> dict[Any, list[tuple[list[int], bool]]]:
    return {(mode, two): change_buckets(mode, two) for mode in MODES for two in (False, True)}


def test_buckets_change_and_gradients_do_not(pool: RankPool) -> None:
    for rank in pool.run(2, change_in_all_modes):
        for name, seen in rank.items():
            assert all(is_same for _, is_same in seen), name
            buckets = [sizes for sizes, _ in seen]
            total = sum(buckets[0])
            assert all(sum(sizes) == total for sizes in buckets), name
            # One for each parameter, one for each dtype, and the default's again.
            assert len(buckets[3]) == max(map(len, buckets)) >= 8, name
            assert len(buckets[5]) == (2 if name[1] else 1), name
            assert buckets[2] == buckets[-2] == buckets[-1] and len(buckets[2]) > 1, name


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


def accumulate_in_all_modes() -> dict[Any, list[bool]]:
    return {
        (mode, as_view, set_to_none): change_between_backwards(mode, as_view, set_to_none)
        for mode in ("plain", "unused", "static")
        for as_view, set_to_none in ((True, True), (True, False), (False, True))
    }


def test_what_was_accumulated_before_a_change_is_kept(pool: RankPool) -> None:
    for rank in pool.run(2, accumulate_in_all_modes):
        for name, is_same in rank.items():
            assert is_same == [True] * 16, name


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


def watch_all_modes() -> dict[Any, list[Watched]]:
    return {(mode, view): watch_changes(mode, view) for mode in ("plain", "unused", "static") for view in (True, False)}


def test_the_old_reducer_is_gone_and_hooks_are_not(pool: RankPool) -> None:
    for rank in pool.run(2, watch_all_modes):
        for name, changes in rank.items():
            for seen in changes:
                # The old one would call the hook for its own buckets.
                assert seen.calls == seen.buckets, name
                assert seen.old_that_are_left == 0, name
                assert seen.same_gradients, name
            assert all(seen.old_storages > 0 for seen in changes[1:]), name


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
