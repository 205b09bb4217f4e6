"""What ranks wait for together."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.agreement import wait_for_all
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import control_group
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
