"""When gradients become ready: every rank notes its own times, and all agree on the latest."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero1.ready_clock import ReadyClock
from tests.held_time import HeldTime
from tests.pool import RankPool

NAMES = ("on all ranks", "on the last rank alone", "noted twice", "never")


def agree(hindered_rank: int | None) -> dict[str, float] | None:
    """What all ranks come to where each is slower than the one before, and the last has one gradient more."""
    parameters = {name: torch.zeros(3) for name in NAMES}
    rank, control = dist.get_rank(), make_collectives(process_groups().control, torch.device("cpu"))
    held = HeldTime()
    with patch("time.perf_counter", held):
        clock = ReadyClock(torch.device("cpu"))
        clock.note(parameters["noted twice"])
        held.pass_by(0.25 * (rank + 1))
        clock.note(parameters["on all ranks"])
        if rank == dist.get_world_size() - 1:
            clock.note(parameters["on the last rank alone"])
        held.pass_by(0.25)
        clock.note(parameters["noted twice"])
    times = clock.agree(list(parameters.values()), rank == hindered_rank, control)
    return None if times is None else {name: times[parameter] for name, parameter in parameters.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_latest_rank_says_when_a_gradient_is_ready(pool: RankPool, world_size: int) -> None:
    found: list[Any] = pool.run(world_size, agree, None)
    assert found == [found[0]] * world_size
    everywhere, alone, twice, never = (found[0][name] for name in NAMES)
    # The slowest rank's times, and the last of several.
    slowest = 0.25 * world_size
    assert (everywhere, alone, twice, never) == (slowest, slowest, slowest + 0.25, math.inf)
    # Nobody has times where one rank can do nothing with them.
    assert pool.run(world_size, agree, world_size - 1) == [None] * world_size
