"""A rank that is killed before ranks have agreed on where they report is named all the same."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy
from tests.faults.jobs import TIMEOUT, Job
from tests.faults.test_kills import NAMES, SECONDS
from tests.strategies.parity import make_trainer


def killed_in_set_up(strategy: type[Any], rank: int) -> None:
    class Killed(strategy):  # type: ignore[misc]
        def broadcast(self, *args: Any) -> Any:
            if dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().broadcast(*args)

    make_trainer(Killed(timeout=TIMEOUT), max_steps=1).fit(BoringModel())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank"), [(ZeRO1Strategy, 1), (TunedDDPStrategy, 0)])
def test_a_rank_that_is_killed_in_the_first_broadcast_is_named(tmp_path: Path, strategy: type[Any], rank: int) -> None:
    ended = Job(tmp_path / "job", 3, killed_in_set_up, strategy, rank).wait(SECONDS)
    assert ended[rank].exitcode == -9, ended[rank].output
    for survivor in set(range(3)) - {rank}:
        assert ended[survivor].exitcode == 1, ended[survivor].output
        # Who had sent all went on: those that did not are missing for it, too.
        assert all(str(rank) in named for named in NAMES.findall(ended[survivor].output)), ended[survivor].output
        assert NAMES.search(ended[survivor].output), ended[survivor].output
