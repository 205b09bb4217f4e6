"""torch's own DDP gets another reducer while it trains, and nothing is left of the old one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.ddp.reducers import exchange_reducer, sent_by
from tests.pool import RankPool

MODES: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
SIZES = (None, 1, 2**30, None)
"""Bytes of each bucket, one after the other; None for the default's."""


class Buckets:
    """A communication hook that does what DDP does, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls = 0
        self.storages: set[StorageWeakRef] = set()

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        self.storages.add(StorageWeakRef(bucket.buffer().untyped_storage()))
        return allreduce_hook(state, bucket)


def exchange(mode: dict[str, Any], as_view: bool) -> list[tuple[int, int, int]]:
    """After each exchange: how many buckets there are, how many old ones are left, and calls of the hook in a step."""
    module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 40), nn.Linear(40, 3))
    # Small enough that the default has several buckets, too.
    options: dict[str, Any] = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 1 / 2**10, **mode}
    buckets, seen = Buckets(), []

    def wrap(size: int | None) -> DistributedDataParallel:
        sizes = {} if size is None else {"bucket_cap_mb": size / 2**20}
        ddp = DistributedDataParallel(module, init_sync=False, **{**options, **sizes})
        ddp.register_comm_hook(ddp.process_group, buckets.__call__)
        return ddp

    changed = wrap(None)
    for number, size in enumerate(SIZES):
        old, buckets.storages = buckets.storages, set()
        if number:
            exchange_reducer(changed, sent_by(changed).keys(), wrap, size, None)
        # A static graph has its final buckets from its third step on.
        for _ in range(4):
            buckets.calls = 0
            changed(torch.randn(5, 12)).square().sum().backward()
            changed.zero_grad()
        facts = changed._get_ddp_logging_data()
        sizes = facts["rebuilt_bucket_sizes"] if facts["has_rebuilt_buckets"] else facts["bucket_sizes"]
        seen.append((len(sizes.split(",")), sum(not storage.expired() for storage in old), buckets.calls))
    return seen


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_old_reducer_is_gone(pool: RankPool, mode: dict[str, Any], as_view: bool) -> None:
    for seen in pool.run(2, exchange, mode, as_view):
        # The old one would call the hook for its own buckets, too.
        assert all((left, calls) == (0, buckets) for buckets, left, calls in seen)
        default, small, large, default_again = (buckets for buckets, *_ in seen)
        # One for each parameter, and one for all.
        assert small == 6 > default == default_again > large == 1
