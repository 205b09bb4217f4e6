"""Exceptions on one rank, full disks, signals while saving: all ranks end soon, and what was saved is whole."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.faults.jobs import TIMEOUT, Job
from tests.faults.test_kills import ARGUMENTS, SECONDS, check_all_whole
from tests.faults.trainings import RaisesOnOneRank, SignalledWhileSaving, train
from tests.slow import slow_unless


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("saving", ["full", "sharded"])
def test_a_save_after_one_ranks_exception_waits_for_nobody(tmp_path: Path, saving: str, rank: int) -> None:
    folder = tmp_path / "checkpoints"
    raises = RaisesOnOneRank(rank, step=5)
    on_exception = OnExceptionCheckpoint(str(folder), "on_exception")
    job = Job(tmp_path / "job", 2, train, str(folder), ARGUMENTS[saving], None, raises, on_exception)
    ended = job.wait(SECONDS)
    own, other = ended[rank], ended[1 - rank]
    assert own.exitcode == 1 and own.output.rstrip().endswith("ValueError: a fault of this rank alone")
    assert f"rank {1 - rank} did not come: nothing was saved" in own.output
    assert other.exitcode == 1 and f"ank {rank} did not answer" in other.output
    assert other.seconds_after_first < TIMEOUT.total_seconds()
    assert not (folder / "on_exception.ckpt").exists()
    check_all_whole(folder)


def test_a_save_after_everybodys_exception_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    raises = [RaisesOnOneRank(rank, step=5) for rank in range(2)]
    saves = ModelCheckpoint(str(folder), "late", monitor="never", save_top_k=0, save_on_exception=True)
    job = Job(tmp_path / "job", 2, train, str(folder), {}, None, *raises, saves)
    for ended in job.wait(SECONDS):
        assert ended.exitcode == 1 and ended.output.rstrip().endswith("ValueError: a fault of this rank alone")
    assert torch.load(folder / "late.ckpt", weights_only=True)["global_step"] == 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("saving", slow_unless(lambda saving: saving == "full", ARGUMENTS))
def test_a_full_disk_ends_all_ranks_and_leaves_what_was_saved(small_disk: Path, tmp_path: Path, saving: str) -> None:
    full = small_disk / "fills"
    full.write_bytes(b"x" * 40_000)
    ended = Job(tmp_path / "job", 2, train, str(small_disk), ARGUMENTS[saving]).wait(SECONDS)
    for rank in ended:
        assert rank.exitcode == 1 and "No space left on device" in rank.output, rank.output
        assert "was saved" in rank.output or "unchanged" in rank.output or "could not save" in rank.output
        assert rank.seconds_after_first < TIMEOUT.total_seconds()
    assert not list(small_disk.glob(".saving-*"))
    check_all_whole(small_disk)


@pytest.mark.parametrize("saving", slow_unless(lambda saving: saving == "sharded", ARGUMENTS))
def test_sigterm_during_a_save_lets_it_finish(tmp_path: Path, saving: str) -> None:
    folder = tmp_path / "checkpoints"
    arguments: dict[str, Any] = ARGUMENTS[saving]
    told = SignalledWhileSaving(signal.SIGTERM, rank=1, time_of_writing=3)
    for ended in Job(tmp_path / "job", 2, train, str(folder), arguments, None, told).wait(SECONDS):
        assert ended.exitcode == 143, ended.output
    check_all_whole(folder)
    for ended in Job(tmp_path / "again", 2, train, str(folder), arguments).wait(SECONDS):
        assert ended.exitcode == 0, ended.output
    check_all_whole(folder)


def test_where_the_store_is_gone_with_rank_0_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    job = Job(tmp_path / "job", 2, train, str(folder), {}, ("before fsync", 0, 3), tcp=True)
    ended = job.wait(SECONDS)
    assert ended[0].exitcode == -9
    assert ended[1].exitcode == 1 and "rank 0 did not" in ended[1].output.lower()
