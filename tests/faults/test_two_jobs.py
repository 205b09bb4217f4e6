"""Two jobs that save to one folder: each comes to its end, or to a clear error, and what they leave is whole."""

import time
from pathlib import Path

import pytest
import torch

from tests.comparing import assert_same
from tests.faults.jobs import Ended, Job
from tests.faults.test_kills import ARGUMENTS, SECONDS, check_all_whole
from tests.faults.trainings import STEPS, train

TOLD = ("another job saves to the same folder", "Ranks have read different checkpoints", "was not saved")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["together", "later"])
@pytest.mark.parametrize("saving", ARGUMENTS)
def test_what_two_jobs_save_in_one_folder_is_whole(tmp_path: Path, saving: str, when: str) -> None:
    folder = tmp_path / "checkpoints"
    first = Job(tmp_path / "first", 2, train, str(folder), ARGUMENTS[saving])
    began = time.monotonic()
    while when == "later" and not (folder / "last.ckpt").exists() and time.monotonic() < began + SECONDS:
        time.sleep(0.01)
    # The second one resumes from what the first one goes on replacing.
    second = Job(tmp_path / "second", 2, train, str(folder), ARGUMENTS[saving])
    for job in (first, second):
        check_ended(job.wait(SECONDS))
    last_step = check_all_whole(folder)
    assert last_step > 0
    again = Job(tmp_path / "again", 2, train, str(folder), ARGUMENTS[saving]).wait(SECONDS)
    whole = Job(tmp_path / "whole", 2, train, str(tmp_path / "alone"), ARGUMENTS[saving]).wait(SECONDS)
    assert all(rank.exitcode == 0 for rank in (*again, *whole))
    assert all(f"begins after step {last_step}." in rank.output for rank in again)
    assert check_all_whole(folder) == STEPS
    assert_same(torch.load(folder / "result.pt"), torch.load(tmp_path / "alone" / "result.pt"))


def check_ended(ranks: list[Ended]) -> None:
    if any(rank.exitcode for rank in ranks):
        assert all(rank.exitcode == 1 and any(said in rank.output for said in TOLD) for rank in ranks), ranks
