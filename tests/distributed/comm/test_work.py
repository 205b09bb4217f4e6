"""Work in flight whose other rank is gone, and programs that end after it."""

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.pool import RankPool


def wait_for_a_rank_that_is_gone(parts_differ: bool) -> tuple[list[str], float]:
    """Errors of a rank that waits twice, and how long the second wait takes."""
    rank, launched = dist.get_rank(), torch.zeros(1)
    group = process_groups().gradients
    collectives = make_collectives(group, torch.device("cpu"))
    if rank == 2:
        for other in range(2):
            dist.recv(launched, other)
        del collectives, group
        dist.destroy_process_group()
        return [], 0.0
    bounds = (0, 9, 9, 9) if parts_differ else range(0, 10, 3)
    work = collectives.reduce_scatter(torch.zeros(9), torch.empty(bounds[rank + 1] - bounds[rank]), bounds)
    dist.send(launched, 2)
    errors = []
    for _ in range(2):
        began = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))
    # As a training does that ends by it, so that others do not wait for this rank.
    del collectives, work, group
    dist.destroy_process_group()
    gc.collect()
    return errors, time.monotonic() - began


@pytest.mark.parametrize("parts_differ", [False, True])
def test_a_second_wait_for_a_rank_that_is_gone_fails_at_once(own_pool: RankPool, parts_differ: bool) -> None:
    for errors, seconds in own_pool.run(3, wait_for_a_rank_that_is_gone, parts_differ)[:2]:
        assert len(errors) == 2 and errors[0] in errors[1] and seconds < 5.0


ENDS_WITH_A_COLLECTIVE = """
import sys
import torch
import torch.distributed as dist
from lightning_parstrat.distributed.comm.process_groups import process_groups

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
process_groups()
for _ in range(3):
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.ones(1))
del parts
"""


@pytest.mark.slow
def test_a_program_that_ends_right_after_a_collective_succeeds(tmp_path: Path) -> None:
    """Without the pause at exit about a fifth of such programs abort, so that a few attempts show it."""
    script = tmp_path / "program.py"
    script.write_text(ENDS_WITH_A_COLLECTIVE)
    for attempt in range(4):
        arguments = [sys.executable, str(script), str(tmp_path / f"rendezvous-{attempt}")]
        ranks = [subprocess.Popen([*arguments, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
