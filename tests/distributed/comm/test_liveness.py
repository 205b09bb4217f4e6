"""Ranks that are missing, found by the store of the process group."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import (
    Liveness,
    MissingRanksError,
    begin_liveness,
    is_of_a_collective,
    met,
)
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.pool import RankPool

SHORT, LONG = timedelta(seconds=1.5), timedelta(seconds=60)
"""How long ranks wait for one that does not come, and for one that does, on a busy machine."""


def missing(name: str, when: list[str]) -> tuple[list[int], list[int]] | None:
    """Each rank comes soon, a little later, never, or after the others have given up. And what the first one found."""
    liveness, own = Liveness(name), when[dist.get_rank()]
    dist.barrier()
    if own == "never":
        return None
    if own == "later":
        time.sleep(0.1)
    if own == "too late":
        liveness._store.wait(["test/1/missing"], LONG)
    return liveness.missing("test", LONG if "later" in when else SHORT), liveness.found


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (["soon", "later", "soon"], [([], [])] * 3),
        (["soon", "never", "soon"], [([1], [1]), None, ([1], [1])]),
        (["never", "soon", "never"], [None, ([0, 2], [0, 2]), None]),
        (["soon", "too late", "soon"], [([1], [1]), ([0, 2], [1]), ([1], [1])]),
    ],
)
def test_those_that_do_not_come_are_missing(
    pool: RankPool, when: list[str], expected: list[Any], request: pytest.FixtureRequest
) -> None:
    assert pool.run(3, missing, request.node.name, when) == expected


def test_errors_of_collectives_are_known() -> None:
    for error, expected in (
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:35512"), True),
        (RuntimeError("Timed out waiting 15000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timed out"), False),
        (MissingRanksError("barrier"), False),
    ):
        assert is_of_a_collective(error) is expected, error


def come_to_a_call(name: str, how: str) -> str:
    """Rank 1 never comes, comes later, or goes on to the next control message before it comes."""
    liveness, group, rank = begin_liveness(name), process_groups().control, dist.get_rank()
    messages = ControlMessages(make_collectives(group, torch.device("cpu")))
    messages.signal = 1 + rank
    if rank == 1 and how == "elsewhere":
        messages.launch()
    if rank == 1 and how == "late":
        time.sleep(0.5)
    timeout = liveness._store.timeout
    liveness._store.set_timeout(SHORT if how == "never" else LONG)
    said = ""
    try:
        if rank == 0 or how != "never":
            with met("`optimizer.state_dict()`", group, "Call it on all ranks."):
                dist.barrier(group=group)
    except RuntimeError as error:
        said = str(error)
    finally:
        liveness._store.set_timeout(timeout)
    if rank == 0 or how != "elsewhere":
        messages.launch()
    return f"{said} {messages.latest().signal}"


def test_a_call_that_not_all_ranks_make_mixes_nothing_up(pool: RankPool) -> None:
    assert pool.run(2, come_to_a_call, "late", "late") == [" 3"] * 2
    found = pool.run(2, come_to_a_call, "never", "never")
    assert found == ["`optimizer.state_dict()`: rank 1 did not come. Call it on all ranks. 3", " 3"]
    for error in pool.run(2, come_to_a_call, "elsewhere", "elsewhere"):
        assert "was called by all ranks, but at different points of the training" in error and error.endswith(" 3")
