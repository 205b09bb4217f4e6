"""Values, flags, nodes and failures that ranks agree on while the host waits."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.agreement import topology_of_ranks, wait_for_all
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
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


def topologies() -> list[Topology]:
    rank = dist.get_rank()
    return [topology_of_ranks((names[rank], numbers[rank]), control()) for names, numbers, _ in PLACED]


def test_ranks_agree_on_nodes(pool: RankPool) -> None:
    assert pool.run(4, topologies) == [[Topology(nodes) for _, _, nodes in PLACED]] * 4
