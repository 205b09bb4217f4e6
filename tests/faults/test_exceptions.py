"""A rank out of memory, kills in set-up, signals while saving, and two jobs in one folder.

All ranks end soon, and what was saved is whole.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy
from tests.comparing import assert_same
from tests.faults.jobs import TIMEOUT, Ended, Job
from tests.faults.test_kills import NAMES, SECONDS, check_all_whole
from tests.faults.trainings import (
    PLACES_THAT_ALLOCATE,
    STEPS,
    RunsOutOfMemory,
    SignalledWhileSaving,
    train,
)
from tests.slow import slow_unless
from tests.strategies.checkpoint.trainings import FORMATS
from tests.strategies.parity import make_trainer


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        pytest.param(place, number % 2, marks=() if place == "backward" else pytest.mark.slow)
        for number, place in enumerate(PLACES_THAT_ALLOCATE)
    ],
)
def test_a_rank_out_of_memory_ends_all(tmp_path: Path, place: str, rank: int) -> None:
    out = RunsOutOfMemory(rank, place, step=5)
    ended = Job(tmp_path / "job", 2, train, str(tmp_path / "checkpoints"), {}, None, out).wait(SECONDS)
    own, other = ended[rank], ended[1 - rank]
    assert own.exitcode == 1 and "OutOfMemoryError: CUDA out of memory" in own.output, own.output
    assert other.exitcode == 1 and "Error" in other.output, other.output
    # Sooner than collectives time out: the end of the connection is noticed.
    assert max(own.seconds_after_first, other.seconds_after_first) < TIMEOUT.total_seconds()
    assert check_all_whole(tmp_path / "checkpoints") == 4


def check_goes_on(tmp_path: Path, arguments: dict[str, Any], step: int) -> None:
    """A training goes on from what is in the folder, and comes to what one comes to that begins elsewhere."""
    for folder, begin in (("checkpoints", step), ("whole", 0)):
        for rank in Job(tmp_path / "again", 2, train, str(tmp_path / folder), arguments).wait(SECONDS):
            assert rank.exitcode == 0 and f"begins after step {begin}." in rank.output, rank.output
    assert_same(torch.load(tmp_path / "checkpoints" / "result.pt"), torch.load(tmp_path / "whole" / "result.pt"))


@pytest.mark.parametrize("saving", slow_unless(lambda saving: saving == "sharded", FORMATS))
def test_sigterm_during_a_save_lets_it_finish(tmp_path: Path, saving: str) -> None:
    folder = tmp_path / "checkpoints"
    arguments: dict[str, Any] = FORMATS[saving]
    told = SignalledWhileSaving(signal.SIGTERM, rank=1, time_of_writing=3)
    for ended in Job(tmp_path / "job", 2, train, str(folder), arguments, None, told).wait(SECONDS):
        assert ended.exitcode == 143, ended.output
    # It came in the save of step 4, and ranks agree in the next step.
    assert check_all_whole(folder) == 5
    check_goes_on(tmp_path, arguments, 5)
    assert check_all_whole(folder) == STEPS


def test_where_the_store_is_gone_with_rank_0_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    job = Job(tmp_path / "job", 2, train, str(folder), {}, ("before fsync", 0, 3), tcp=True)
    ended = job.wait(SECONDS)
    assert ended[0].exitcode == -9
    assert ended[1].exitcode == 1 and "rank 0 did not" in ended[1].output.lower()


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


TOLD = ("another job saves to the same folder", "Ranks have read different checkpoints", "was not saved")


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "when"), [("full", "later"), ("sharded", "together"), ("async", "later")])
def test_what_two_jobs_save_in_one_folder_is_whole(tmp_path: Path, saving: str, when: str) -> None:
    folder = tmp_path / "checkpoints"
    first = Job(tmp_path / "first", 2, train, str(folder), FORMATS[saving])
    began = time.monotonic()
    while when == "later" and not (folder / "last.ckpt").exists() and time.monotonic() < began + SECONDS:
        time.sleep(0.01)
    # The second one resumes from what the first one goes on replacing.
    second = Job(tmp_path / "second", 2, train, str(folder), FORMATS[saving])
    for job in (first, second):
        check_ended(job.wait(SECONDS))
    last_step = check_all_whole(folder)
    assert last_step > 0
    again = Job(tmp_path / "again", 2, train, str(folder), FORMATS[saving]).wait(SECONDS)
    whole = Job(tmp_path / "whole", 2, train, str(tmp_path / "alone"), FORMATS[saving]).wait(SECONDS)
    assert all(rank.exitcode == 0 for rank in (*again, *whole))
    begun = {line for rank in again for line in rank.output.splitlines() if line.startswith("begins")}
    # From a checkpoint that was saved when all epochs had ended, nothing is trained.
    assert begun == {f"begins after step {last_step}."} or (not begun and last_step == STEPS), again
    assert check_all_whole(folder) == STEPS
    assert_same(torch.load(folder / "result.pt"), torch.load(tmp_path / "alone" / "result.pt"))


def check_ended(ranks: list[Ended]) -> None:
    if any(rank.exitcode for rank in ranks):
        assert all(rank.exitcode == 1 and any(said in rank.output for said in TOLD) for rank in ranks), ranks
