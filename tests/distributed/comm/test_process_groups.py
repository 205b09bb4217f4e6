"""Process groups: connections are made for whom there is something to send to, not for all."""

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.doubling import meetings
from lightning_parstrat.distributed.comm.open_files import files_needed
from lightning_parstrat.distributed.comm.process_groups import (
    ProcessGroups,
    checkpoint_group,
    connect_for_sums,
    connections_on_demand,
    process_groups,
    subgroup,
)
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.pool import RankPool
from tests.torch_versions import needs_torch


def groups_twice() -> tuple[int, bool, bool, str]:
    """How many groups there are, and members of a group of some; whether they are made once; the backend of control."""
    first, second = process_groups(), process_groups()
    mates = [0, 1] if dist.get_rank() < 2 else [2, 3]
    made = subgroup(first.gradients, mates)
    again = subgroup(first.gradients, mates[::-1]) is made and subgroup(first.parameters, mates) is not made
    once = all(one is other for one, other in zip(first, second, strict=True))
    return len({id(group) for group in first}), again and made.size() == 2, once, dist.get_backend(first.control)


def test_process_groups_are_separate_and_made_once_for_each_purpose(pool: RankPool) -> None:
    assert pool.run(4, groups_twice) == [(3, True, True, "gloo")] * 4


def sockets() -> int:
    descriptors = Path("/proc/self/fd")
    return sum(one.is_symlink() and os.readlink(one).startswith("socket:") for one in list(descriptors.iterdir()))


def _free_groups_of_other_tests() -> None:
    """Else a collection of garbage may close their sockets while this test counts."""
    gc.collect()


def groups_connected_on_demand(seconds: int) -> ProcessGroups:
    """As in a large world; no other test has groups of this timeout."""
    with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
        return process_groups(timedelta(seconds=seconds))


def sockets_of_new_groups(seconds: int) -> tuple[int, int]:
    """How many sockets this rank has more when the groups were made, and when a control message was sent."""
    _free_groups_of_other_tests()
    before = sockets()
    groups = groups_connected_on_demand(seconds)
    made = sockets()
    # By the default group, which is connected: the first message of a rank ahead would be counted with what was made.
    dist.barrier()
    messages = ControlMessages(make_collectives(groups.control, torch.device("cpu")))
    for _ in range(3):
        messages.launch().wait()
    return made - before, sockets() - made


@pytest.mark.parametrize("world_size", [2, 5, 6])
def test_ranks_are_connected_when_they_have_something_to_send(pool: RankPool, world_size: int) -> None:
    # Several: which of two ranks waits for the other to be connected depends on where they listen.
    for seconds in (61, 81, 82, 83):
        for rank, (made, used) in enumerate(pool.run(world_size, sockets_of_new_groups, seconds)):
            # Each group listens; in a full mesh it has a connection to each other rank, too.
            assert made == 4
            # A connection for either way.
            assert 0 < used <= 2 * len(meetings(rank, world_size))


def scheduling_of_gloos_threads() -> list[int]:
    process_groups(timedelta(seconds=84))
    tasks = list(Path("/proc/self/task").iterdir())
    return [os.sched_getscheduler(int(one.name)) for one in tasks if (one / "comm").read_text().startswith("gloo_")]


@needs_torch("2.13", "Gloo's threads have no names")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no batch class")
def test_threads_that_read_from_connections_interrupt_nobody(pool: RankPool) -> None:
    for scheduling in pool.run(2, scheduling_of_gloos_threads):
        # Of the default group, and of those for gradients, parameters, control messages and checkpoints.
        assert len(scheduling) >= 5
        assert set(scheduling) == {os.SCHED_BATCH}


def test_what_the_environment_says_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with connections_on_demand(1024):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    with connections_on_demand(1024):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    with connections_on_demand(4):
        assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ


def sockets_of_first_sum(connects: bool) -> int:
    """How many more this rank has when it has made a large sum than before; first it may be connected for sums."""
    group = groups_connected_on_demand(63 + connects).gradients
    if connects:
        connect_for_sums(group, torch.device("cpu"))
    _free_groups_of_other_tests()
    before = sockets()
    summed = torch.ones(100_000)
    dist.all_reduce(summed, group=group)
    assert summed.eq(dist.get_world_size()).all()
    return sockets() - before


def test_no_rank_waits_for_a_connection_in_its_first_sum(pool: RankPool) -> None:
    assert pool.run(5, sockets_of_first_sum, True) == [0] * 5
    # With its neighbours in a ring.
    assert sum(pool.run(5, sockets_of_first_sum, False)) >= 5


def sockets_of_all_groups() -> int:
    process_groups(timedelta(seconds=65))
    checkpoint_group(timedelta(seconds=65))
    return sockets()


def test_a_rank_has_no_more_sockets_than_the_formula_says(own_pool: RankPool) -> None:
    for size in (2, 6):
        for found in own_pool.run(size, sockets_of_all_groups):
            # The pool's own pipes are there, too.
            assert 0 < found <= files_needed(size, on_cpu=True)


def sockets_of_first_step() -> int:
    """How many more this rank has when it has trained a step than when training was set up."""
    module = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = ShardedDataParallel(module, [optimizer], ShardingPolicy(), groups_connected_on_demand(62))
    before = sockets()
    loss = module(torch.ones(2, 6)).sum()
    engine.prepare_backward(loss)
    loss.backward()
    optimizer.step()
    engine.close()
    return sockets() - before


@pytest.mark.parametrize("world_size", [2, 5])
def test_no_rank_waits_for_a_connection_in_its_first_step(own_pool: RankPool, world_size: int) -> None:
    # One that ends meanwhile would be waited for until the connection times out.
    assert own_pool.run(world_size, sockets_of_first_step) == [0] * world_size
