"""torch's own DDP gets another reducer while it trains, and gradients stay what they are."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.ddp.bucket_tuner import keep_size, kept_size
from lightning_parstrat.distributed.ddp.reducers import exchange_reducer, sent_by
from tests.comparing import distance
from tests.distributed.engines import squared_error
from tests.pool import RankPool

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static and unused": {"static_graph": True, "find_unused_parameters": True},
}
SIZES = (None, 4 * 2**10, None, 1, 2**30, None)
"""Bytes of each bucket, one after the other; None for the default's."""

SENDS = (True, False, True, True, True)
"""A static graph has its final buckets from its third step on, and its first backward must send."""


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


class Buckets:
    """A communication hook that does what DDP does, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls = 0
        self.storages: set[StorageWeakRef] = set()

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        self.storages.add(StorageWeakRef(bucket.buffer().untyped_storage()))
        return allreduce_hook(state, bucket)


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in module.parameters()]


def exchange(mode: str, two_dtypes: bool, as_view: bool, set_to_none: bool) -> list[tuple[int, int, list[int], float]]:
    """After each exchange: buckets, how many old ones are left, calls of the hook, and how far gradients are off."""
    module = Net(two_dtypes, has_unused=mode != "plain")
    # Small enough that the default has several buckets, too.
    options: dict[str, Any] = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 10 / 2**10, **MODES[mode]}
    untouched = DistributedDataParallel(copy.deepcopy(module), **options)
    changed = DistributedDataParallel(module, **options)
    buckets, seen, steps = Buckets(), [], 0
    changed.register_comm_hook(changed.process_group, buckets.__call__)

    def wrap(size: int | None) -> DistributedDataParallel:
        sizes = {} if size is None else {"bucket_cap_mb": size / 2**20}
        ddp = DistributedDataParallel(module, init_sync=False, **{**options, **sizes})
        ddp.register_comm_hook(ddp.process_group, buckets.__call__)
        return ddp

    for size in SIZES:
        old, buckets.storages = buckets.storages, set()
        if seen:
            exchange_reducer(changed, sent_by(changed).keys(), wrap, size, None)
        apart, calls = 0.0, []
        for send in SENDS if seen else (True, *SENDS):
            steps += 1
            buckets.calls = 0
            for ddp in (untouched, changed):
                with nullcontext() if send else ddp.no_sync():
                    squared_error(ddp, 10 * steps + dist.get_rank()).backward()
            apart = max(apart, distance(gradients(changed), gradients(untouched)))
            calls.append(buckets.calls)
            if send:
                untouched.zero_grad(set_to_none)
                changed.zero_grad(set_to_none)
        facts = changed._get_ddp_logging_data()
        sizes = facts["rebuilt_bucket_sizes"] if facts["has_rebuilt_buckets"] else facts["bucket_sizes"]
        left = sum(not storage.expired() for storage in old)
        seen.append((len(sizes.split(",")), left, calls[-2:], apart))
    return seen


def exchange_in_all_modes() -> dict[Any, Any]:
    ways = [(False, True, True), (True, True, False), (False, False, True)]
    return {(mode, *way): exchange(mode, *way) for mode in MODES for way in ways}


def test_the_old_reducer_is_gone_and_gradients_are_the_same(pool: RankPool) -> None:
    for rank in pool.run(2, exchange_in_all_modes):
        for name, seen in rank.items():
            for buckets, left, calls, apart in seen:
                # The old one would call the hook for its own buckets, too.
                assert (left, calls, apart) == (0, [buckets] * 2, 0), name
            # One for each parameter, one for each dtype, and the default's again.
            numbers = [buckets for buckets, *_ in seen]
            assert numbers[3] == max(numbers) >= 8 and numbers[4] == (2 if name[1] else 1), name
            assert numbers[0] == numbers[2] == numbers[5] > 1, name


DAMAGED = (b"", bytes(range(256)), b"[1, 2]", b"-1", b"1.5", b'{"format": 2, "bytes": 3}')


def test_what_was_kept_is_found_again_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plans" / "plan.json"
    assert kept_size(path) is None
    for size in (2**20, 0):
        keep_size(path, size)
        # And nothing else is left there.
        assert kept_size(path) == size and list(path.parent.iterdir()) == [path]
    for content in DAMAGED:
        path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            kept_size(path)
        assert str(error.value).startswith(f"{path}: "), content
    with pytest.raises(OSError):
        keep_size(path / "below a file", 1)
