"""What ranks wait for together."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.topology import Node, Topology
from lightning_parstrat.distributed.comm.agreement import (
    all_or_none,
    any_rank,
    from_first_rank,
    topology_of_ranks,
    wait_for_all,
)
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import control_group, process_groups
from tests.pool import RankPool


def meets(folder: str, late: int) -> list[int]:
    """Three times: whether the last had come when this rank went on; and a sum that the last began before it came."""
    control = make_collectives(control_group(), torch.device("cpu"))
    is_late = dist.get_rank() == late
    found: list[int] = []
    for number in range(3):
        come, total = Path(folder) / str(number), torch.ones(1, dtype=torch.int64)
        if is_late:
            work = control.all_reduce(total)
            # So that whoever does not wait is found out.
            time.sleep(0.05)
            come.touch()
            wait_for_all(control)
            work.wait()
        else:
            wait_for_all(control)
            found.append(come.exists())
            control.all_reduce(total).wait()
        found.append(int(total))
    return found


@pytest.mark.parametrize(("world_size", "late"), [(2, 0), (3, 2), (4, 1), (5, 4), (6, 0)])
def test_nobody_goes_on_before_the_last_has_come(pool: RankPool, tmp_path: Path, world_size: int, late: int) -> None:
    for rank, found in enumerate(pool.run(world_size, meets, str(tmp_path), late)):
        assert found == ([world_size] * 3 if rank == late else [True, world_size] * 3)


def nodes_by_rank(names: str, numbers: str) -> tuple[Topology, int]:
    """Who shares a node, and how many small reductions it took to know."""
    rank, control = dist.get_rank(), make_collectives(control_group(), torch.device("cpu"))
    found = topology_of_ranks(Node(names[rank], int(numbers[rank])), control)
    return found, control.traffic.small_reductions


PLACED = {
    "one node": ("aaaa", "0000", (0, 0, 0, 0), 2),
    "in order": ("aabb", "0011", (0, 0, 1, 1), 2),
    "each its own": ("abcd", "0123", (0, 1, 2, 3), 2),
    "of one name": ("aaaa", "0011", (0, 0, 1, 1), 2),
    "without numbers": ("aabb", "0000", (0, 0, 1, 1), 3),
    "without numbers, one another": ("aaab", "0000", (0, 0, 0, 1), 3),
    "by turns": ("abab", "0101", (0, 1, 0, 1), 3),
    "by turns, without numbers": ("abab", "0000", (0, 1, 0, 1), 3),
    "as it comes": ("baab", "1001", (0, 1, 1, 0), 3),
    "against their order": ("bbaa", "1100", (0, 0, 1, 1), 3),
    "unequal": ("aaab", "0001", (0, 0, 0, 1), 3),
    "of several names": ("abcc", "0011", (0, 1, 2, 2), 3),
    "names crosswise": ("abab", "0011", (0, 1, 2, 3), 3),
    "numbers that begin at 1": ("aabb", "1122", (0, 0, 1, 1), 3),
    "more numbers than ranks": ("aabb", "0099", (0, 0, 1, 1), 3),
    "of three, unequal": ("aab", "001", (0, 0, 1), 3),
    "of five, each its own": ("abcde", "01234", (0, 1, 2, 3, 4), 2),
}


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_ranks_agree_on_who_shares_a_node(pool: RankPool, world_size: int) -> None:
    for names, numbers, nodes, reductions in PLACED.values():
        if len(names) == world_size:
            assert pool.run(world_size, nodes_by_rank, names, numbers) == [(Topology(nodes), reductions)] * world_size


def one_says(flags: list[bool]) -> tuple[bool, int]:
    collectives = make_collectives(process_groups().control, torch.device("cpu"))
    return any_rank(flags[dist.get_rank()], collectives), collectives.traffic.small_reductions


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_learn_what_any_says(pool: RankPool, world_size: int) -> None:
    for who in range(-1, world_size):
        flags = [rank == who for rank in range(world_size)]
        assert pool.run(world_size, one_says, flags) == [(who >= 0, int(world_size > 1))] * world_size


def outcomes(failing: list[int], shows_own: bool) -> list[str]:
    """What comes of an action of all ranks, and of one of rank 0's."""
    control, rank = make_collectives(control_group(), torch.device("cpu")), dist.get_rank()

    def act() -> int:
        if rank in failing:
            raise OSError(f"of {rank}")
        return rank

    found = []
    for tried in (
        lambda: all_or_none(act, control, lambda failed: RuntimeError(failed), shows_own),
        lambda: from_first_rank(act, control.group, lambda said: RuntimeError(said)),
    ):
        try:
            found.append(str(tried()))
        except (OSError, RuntimeError) as error:
            assert (error.__cause__ is not None) == (isinstance(error, RuntimeError) and rank in failing)
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("failing", "shows_own", "expected"),
    [
        ([], False, ["0 0", "1 0", "2 0"]),
        ([1], False, ["{1: \"OSError('of 1')\"} 0"] * 3),
        ([1], True, ["{1: \"OSError('of 1')\"} 0", "of 1 0", "{1: \"OSError('of 1')\"} 0"]),
        ([0], True, ["of 0 OSError('of 0')", *["{0: \"OSError('of 0')\"} OSError('of 0')"] * 2]),
    ],
)
def test_all_succeed_or_all_raise(pool: RankPool, failing: list[int], shows_own: bool, expected: list[str]) -> None:
    assert [" ".join(found) for found in pool.run(3, outcomes, failing, shows_own)] == expected
