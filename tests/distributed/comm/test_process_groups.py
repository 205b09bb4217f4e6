"""Process groups: ranks are connected with those that they send to, and may open as many files as that takes."""

import gc
import os
import resource
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.open_files import allow_open_files, files_needed, most_open_files
from lightning_parstrat.distributed.comm.process_groups import (
    checkpoint_group,
    connect_on_demand,
    control_group,
    process_groups,
    subgroup,
)
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.pool import RankPool


def groups_twice() -> tuple[int, bool, str]:
    """How many groups there are, whether each is made once, and the backend of control messages."""
    first, second = process_groups(), process_groups()
    mates = [0, 1] if dist.get_rank() < 2 else [2, 3]
    of_mates = subgroup(first.gradients, mates)
    once = all(one is other for one, other in zip(first, second, strict=True))
    once &= subgroup(first.gradients, mates[::-1]) is of_mates and subgroup(first.parameters, mates) is not of_mates
    return len({id(group) for group in first}), once and of_mates.size() == 2, dist.get_backend(first.control)


def test_process_groups_are_separate_and_made_once_for_each_purpose(pool: RankPool) -> None:
    assert pool.run(4, groups_twice) == [(3, True, "gloo")] * 4


def agree_beside_gpus(folder: str) -> bool:
    """Whether ranks of a part of the control group agree if the default group carries tensors of GPUs alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    mates = [0, 1] if rank < 2 else [2, 3]
    return any_rank(rank == 3, make_collectives(subgroup(control_group(), mates), torch.device("cpu")))


def test_messages_of_some_ranks_need_no_gpu_either(own_pool: RankPool, tmp_path: Path) -> None:
    assert own_pool.run(4, agree_beside_gpus, str(tmp_path)) == [False, False, True, True]


def sockets() -> int:
    # Else a collection of garbage may close those of other tests' groups meanwhile.
    gc.collect()
    descriptors = Path("/proc/self/fd")
    return sum(one.is_symlink() and os.readlink(one).startswith("socket:") for one in list(descriptors.iterdir()))


@patch.dict(os.environ)
def test_large_worlds_connect_on_demand_and_the_users_setting_is_kept() -> None:
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    for ranks, expected in ((4, None), (1024, "1")):
        connect_on_demand(ranks)
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == expected
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    connect_on_demand(1024)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"


def sockets_of_first_step() -> int:
    """How many more sockets this rank has after its first step than after the setup."""
    module = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    # As in a large world; no other test has groups of this timeout.
    with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
        groups = process_groups(timedelta(seconds=62))
    engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(), groups)
    before = sockets()
    loss = module(torch.ones(2, 6)).sum()
    engine.prepare_backward(loss)
    loss.backward()
    engine.end_backward()
    optimizer.step()
    engine.close()
    return sockets() - before


def sockets_of_all_groups() -> int:
    process_groups(timedelta(seconds=65))
    checkpoint_group(timedelta(seconds=65))
    return sockets()


@pytest.mark.parametrize("world_size", [2, 5])
def test_no_rank_waits_for_a_connection_in_its_first_step_or_needs_more_files_than_the_formula_says(
    own_pool: RankPool, world_size: int
) -> None:
    # A rank that ends meanwhile would be waited for until the connection times out.
    assert own_pool.run(world_size, sockets_of_first_step) == [0] * world_size
    for found in own_pool.run(world_size, sockets_of_all_groups):
        assert 0 < found <= files_needed(world_size, on_cpu=True)


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one_if_needed() -> None:
    limit = resource.RLIMIT_NOFILE
    before = resource.getrlimit(limit)
    soft, hard = 300, before[1]
    assert most_open_files() == (None if hard == resource.RLIM_INFINITY else hard)
    try:
        for needed, expected in ((soft, soft), (soft + 1, hard), (2**40, hard)):
            resource.setrlimit(limit, (soft, hard))
            for _ in range(2):
                allow_open_files(needed)
                assert resource.getrlimit(limit) == (expected, hard)
    finally:
        resource.setrlimit(limit, before)
    for ranks, on_cpu, needed in ((1, True, 262), (16, True, 352), (512, False, 1792), (1024, True, 6400)):
        assert files_needed(ranks, on_cpu) == needed
