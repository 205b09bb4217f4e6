"""Values, flags, nodes and failures that ranks agree on while the host waits."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.agreement import (
    all_or_none,
    any_rank,
    from_first_rank,
    topology_of_ranks,
    wait_for_all,
)
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives, small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import control_group
from tests.pool import RankPool


def control() -> Collectives:
    return make_collectives(control_group(), torch.device("cpu"))


def barriers(folder: str, last: int) -> list[bool]:
    """Three barriers, to which one rank comes last, after it has begun a sum: whether it was there when others left."""
    collectives, found = control(), []
    for number in range(3):
        arrived, total = Path(folder) / f"{last}-{number}", torch.ones(1, dtype=torch.int64)
        if dist.get_rank() == last:
            work = collectives.all_reduce(total)
            # So that a rank that does not wait is found.
            time.sleep(0.05)
            arrived.touch()
            wait_for_all(collectives)
        else:
            wait_for_all(collectives)
            found.append(arrived.exists())
            work = collectives.all_reduce(total)
        work.wait()
        found.append(int(total) == dist.get_world_size())
    return found


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_no_rank_leaves_a_barrier_before_the_last_has_come(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    for last in {0, world_size - 1}:
        assert all(map(all, pool.run(world_size, barriers, str(tmp_path), last)))


# Names and numbers of the ranks' nodes, and their topology.
PLACED = (
    ("aabb", "0011", (0, 0, 1, 1)),
    ("aaaa", "0011", (0, 0, 1, 1)),
    ("aaab", "0000", (0, 0, 0, 1)),
    ("abab", "0101", (0, 1, 0, 1)),
    ("bbaa", "1100", (0, 0, 1, 1)),
    ("abab", "0011", (0, 1, 2, 3)),
)


def agreed() -> tuple[list[Topology], list[tuple[bool, int]]]:
    """Topologies; and whether any rank has a flag that each has in turn, or none, with small reductions of each."""
    rank, size, flags = dist.get_rank(), dist.get_world_size(), []
    nodes = [(names[rank], numbers[rank]) for names, numbers, _ in PLACED]
    topologies = [topology_of_ranks(node, control()) for node in nodes if size == 4]
    for holder in range(-1, size):
        collectives = control()
        before = small_reductions_of(collectives.group)
        flags.append((any_rank(rank == holder, collectives), small_reductions_of(collectives.group) - before))
    return topologies, flags


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks_agree_on_nodes_and_flags(pool: RankPool, world_size: int) -> None:
    for topologies, flags in pool.run(world_size, agreed):
        assert topologies == [Topology(nodes) for _, _, nodes in PLACED if world_size == 4]
        several = int(world_size > 1)
        assert flags == [(False, several)] + [(True, several)] * world_size


def outcomes(failing: list[int], shows_own: bool) -> str:
    """Results of an action of all ranks, and of one of rank 0's; or the error."""
    collectives, rank = control(), dist.get_rank()

    def act() -> int:
        if rank in failing:
            raise OSError(f"of {rank}")
        return rank

    found = []
    for tried in (
        lambda: all_or_none(act, collectives, lambda failed: RuntimeError(failed), shows_own),
        lambda: from_first_rank(act, collectives.group, lambda failure: RuntimeError(failure)),
    ):
        try:
            found.append(str(tried()))
        except (OSError, RuntimeError) as error:
            assert (error.__cause__ is not None) == (isinstance(error, RuntimeError) and rank in failing)
            found.append(str(error))
    return " ".join(found)


def test_all_succeed_or_all_raise(pool: RankPool) -> None:
    of_0, of_1 = "{0: \"OSError('of 0')\"} OSError('of 0')", "{1: \"OSError('of 1')\"} 0"
    for failing, shows_own, expected in (
        ([], False, ["0 0", "1 0", "2 0"]),
        ([1], False, [of_1] * 3),
        ([1], True, [of_1, "of 1 0", of_1]),
        ([0], True, ["of 0 OSError('of 0')", of_0, of_0]),
    ):
        assert pool.run(3, outcomes, failing, shows_own) == expected
