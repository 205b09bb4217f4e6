"""Ranks or whole jobs are killed at any moment: what was saved is whole, the others end and say who is missing."""

import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests.faults.jobs import TIMEOUT, Job
from tests.faults.trainings import POINTS, STEPS, train
from tests.slow import slow_unless

KILLS = int(os.environ.get("PARSTRAT_KILLS", "10"))
WORLD_SIZE = 2
SECONDS = 60.0
ARGUMENTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sharded": {"checkpoint_format": "sharded"},
    "async": {"checkpoint_format": "sharded", "async_save": True},
}


class Kill(NamedTuple):
    """What is killed, when, and how checkpoints are written."""

    seed: int
    saving: str
    point: str | None
    whole_job: bool
    tcp: bool

    @classmethod
    def drawn(cls, seed: int) -> "Kill":
        """Every second one at a named point, the others at random."""
        draw = random.Random(seed)
        saving = list(ARGUMENTS)[seed // 2 % 3]
        points = [point for point in POINTS if saving != "full" or point != "between renames"]
        point = points[seed // 2 % len(points)] if seed % 2 == 0 else None
        return cls(seed, saving, point, point is None and draw.random() < 0.5, draw.random() < 0.3)

    def __str__(self) -> str:
        return f"{self.seed}-{self.saving}-{self.point or ('all' if self.whole_job else 'one')}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What trainings come to that nobody kills, and how long they take."""
    results = {}
    for saving, arguments in ARGUMENTS.items():
        folder = tmp_path_factory.mktemp(saving)
        began = time.monotonic()
        for ended in Job(folder / "job", WORLD_SIZE, train, str(folder), arguments).wait(SECONDS):
            assert ended.exitcode == 0, ended.output
        results[saving] = (torch.load(folder / "result.pt"), time.monotonic() - began)
    return results


@pytest.mark.parametrize("kill", slow_unless(lambda kill: kill.seed == 0, map(Kill.drawn, range(KILLS))), ids=str)
def test_what_was_saved_is_whole_and_training_goes_on(tmp_path: Path, expected: dict[str, Any], kill: Kill) -> None:
    parameters, seconds = expected[kill.saving]
    draw = random.Random(kill.seed + 1000)
    victim = draw.randrange(WORLD_SIZE)
    killed_at = None
    if kill.point is not None:
        # Only rank 0 renames, and only it writes a full checkpoint; to which others send.
        alone = kill.saving == "full" or "rename" in kill.point
        victim = (1 if kill.saving == "full" else victim) if kill.point == "between ranks" else 0 if alone else victim
        killed_at = (kill.point, victim, draw.randint(1, 6))
    folder = tmp_path / "checkpoints"
    job = Job(tmp_path / "killed", WORLD_SIZE, train, str(folder), ARGUMENTS[kill.saving], killed_at, tcp=kill.tcp)
    if kill.point is None:
        time.sleep(draw.uniform(0.0, 1.2) * seconds)
        job.kill(range(WORLD_SIZE) if kill.whole_job else [victim])
    ended = job.wait(TIMEOUT.total_seconds() + SECONDS)
    if kill.point is not None:
        assert ended[victim].exitcode == -9, ended[victim].output
    if not kill.whole_job and ended[victim].exitcode == -9:
        check_survivor(ended[1 - victim], victim)
    last_step = check_all_whole(folder)
    # On the same file system, whatever it cannot do, but not killed again.
    spared = None if killed_at is None else (*killed_at[:2], 0)
    again = Job(tmp_path / "again", WORLD_SIZE, train, str(folder), ARGUMENTS[kill.saving], spared)
    for rank in again.wait(SECONDS):
        assert rank.exitcode == 0, rank.output
        # Training from the beginning would come to the same parameters.
        assert f"begins after step {last_step}." in rank.output, rank.output
    check_all_whole(folder)
    for actual, reference in zip(torch.load(folder / "result.pt"), parameters, strict=True):
        assert torch.equal(actual, reference)
    assert not list(folder.glob("*-replaced*"))


def check_survivor(survivor: Any, victim: int) -> None:
    """It has ended by an error that names the rank that is missing, unless it had nothing left to do with it."""
    if survivor.exitcode == 0:
        return
    assert survivor.exitcode == 1, survivor.output
    assert survivor.seconds_after_first < TIMEOUT.total_seconds() + 15
    assert f"ank {victim} did not" in survivor.output, survivor.output


def check_all_whole(folder: Path) -> int:
    """Every checkpoint that has its name is whole; returns the step of the last, 0 where there is none."""
    last_step = 0
    for path in folder.glob("*.ckpt"):
        if path.is_dir():
            checkpoint = ShardedCheckpoint(path, weights_only=True)
            loaded = checkpoint.filled(checkpoint.skeleton)
        else:
            loaded = torch.load(path, weights_only=True)
        assert 0 < loaded["global_step"] <= STEPS
        if path.name.startswith("last"):
            last_step = max(last_step, loaded["global_step"])
    return last_step
