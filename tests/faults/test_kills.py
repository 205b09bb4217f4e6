"""Ranks or whole jobs are killed at any moment: what was saved is whole, the others end and say who is missing.

The training that goes on is the one that nobody killed: the same samples in the same steps, and the same parameters.
"""

import datetime
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests.comparing import assert_same
from tests.faults.jobs import TIMEOUT, Ended, Job
from tests.faults.points import LOADING, OF_FOLDERS, OF_RANK_0, POINTS, SAVING
from tests.faults.trainings import MICRO_BATCHES, STEPS, STRATEGIES, EndsAfter, train
from tests.strategies.checkpoint.trainings import FORMATS
from tests.torch_versions import is_before

KILLS = os.environ.get("PARSTRAT_KILLS")
"""How many, the same each time; by default ten, of which nine are others every day."""
SEED = int(os.environ.get("PARSTRAT_KILLS_SEED", "1" if KILLS else f"{datetime.date.today().toordinal() * 10}"))
"""Of the second one. Those of three days in succession hit all named points."""


def seeds(first: int, kills: int) -> list[int]:
    return [0, *range(first, first + kills - 1)]


SECONDS = 120.0
Samples = dict[int, list[int]]
"""Of one rank: on which it was trained, by the number of the batch."""


class Kill(NamedTuple):
    """What is killed, when, and how checkpoints are written.

    Attributes:
        point: Of a save, or of a resume; None for a moment at random.
        tcp: Whether the store, by which the ranks that are left find out who is missing, ends with rank 0.
    """

    seed: int
    strategy: str
    saving: str
    world_size: int
    point: str | None
    whole_job: bool
    tcp: bool

    @classmethod
    def drawn(cls, seed: int) -> "Kill":
        """Every second one at a named point, each in its turn, and the others at random."""
        draw = random.Random(seed)
        strategy, saving, world_size = draw.choice(list(STRATEGIES)), draw.choice(list(FORMATS)), draw.choice((2, 3))
        point = None if seed % 2 else list(POINTS)[seed // 2 % len(POINTS)]
        if strategy == "two pipelines":
            world_size = 4
        if strategy in ("pipeline_custom", "two pipelines", "groups"):
            if point in OF_FOLDERS:
                strategy = "zero1_custom"
            else:
                saving = "full"
        if point in OF_FOLDERS and saving == "full":
            saving = "sharded"
        whole_job, tcp = draw.random() < (0.5 if point is None else 0.25), draw.random() < 0.3
        return cls(seed, strategy, saving, world_size, point, whole_job, tcp)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"strategy": self.strategy, **FORMATS[self.saving]}

    def victim(self, draw: random.Random) -> int:
        if self.point == "between ranks" and self.saving == "full":
            # Who sends to rank 0.
            return draw.randrange(1, self.world_size)
        is_rank_0s = self.point in OF_RANK_0 or (self.point in SAVING and self.saving == "full")
        return 0 if is_rank_0s else draw.randrange(self.world_size)

    def __str__(self) -> str:
        whom = "all" if self.whole_job else "one"
        return f"{self.seed}-{self.strategy}-{self.saving}-{self.world_size}-{self.point or 'random'}-{whom}"


class Expected(NamedTuple):
    """What a training comes to that nobody kills, and how long it takes."""

    samples: list[Samples]
    parameters: list[Tensor]
    seconds: float


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Expected]:
    """By strategy and number of ranks: neither depends on how it saves."""

    @cache
    def train_in_one(strategy: str, world_size: int) -> Expected:
        folder = tmp_path_factory.mktemp(strategy)
        began = time.monotonic()
        ended = Job(folder / "job", world_size, train, str(folder), {"strategy": strategy}).wait(SECONDS)
        assert all(rank.exitcode == 0 for rank in ended), ended
        seconds = time.monotonic() - began
        samples = [samples_of(rank) for rank in ended]
        assert all(len(of_rank) == STEPS * MICRO_BATCHES[strategy] for of_rank in samples)
        return Expected(samples, torch.load(folder / "result.pt"), seconds)

    return train_in_one


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kill], tuple[Path, list[Samples]]]:
    """The checkpoints of a training that was killed within an epoch, and on which samples it was trained."""

    @cache
    def train_in_part(strategy: str, saving: str, world_size: int) -> tuple[Path, list[Samples]]:
        folder = tmp_path_factory.mktemp(f"{strategy}-{saving}")
        arguments = {"strategy": strategy, **FORMATS[saving]}
        job = Job(folder / "job", world_size, train, str(folder / "checkpoints"), arguments, None, EndsAfter(5))
        return folder / "checkpoints", [samples_of(rank) for rank in job.wait(SECONDS)]

    return lambda kill: train_in_part(kill.strategy, kill.saving, kill.world_size)


@pytest.mark.slow
@pytest.mark.parametrize("kill", map(Kill.drawn, seeds(SEED, int(KILLS or 10))), ids=str)
def test_what_was_saved_is_whole_and_training_goes_on(
    tmp_path: Path,
    expected: Callable[[str, int], Expected],
    stopped: Callable[[Kill], tuple[Path, list[Samples]]],
    kill: Kill,
) -> None:
    if "pipeline" in kill.strategy and is_before("2.13"):
        pytest.skip("torch's schedules before 2.13 are refused")
    reference = expected(kill.strategy, kill.world_size)
    folder, trained = tmp_path / "checkpoints", []
    if kill.point in LOADING:
        before, samples = stopped(kill)
        shutil.copytree(before, folder, symlinks=True)
        trained.append(samples)
    draw = random.Random(kill.seed + 1000)
    victim = kill.victim(draw)
    killed_at = None if kill.point is None else (kill.point, victim, draw.randint(1, 5) if kill.point in SAVING else 1)
    job = Job(tmp_path / "killed", kill.world_size, train, str(folder), kill.arguments, killed_at, tcp=kill.tcp)
    everybody = range(kill.world_size)
    if kill.point is None:
        # Gloo waits five timeouts for a rank that ends while they connect.
        time.sleep(draw.uniform(0.3, 1.0) * reference.seconds)
        job.kill(everybody if kill.whole_job else [victim])
    elif kill.whole_job:
        job.wait_for(victim, SECONDS)
        job.kill(everybody)
    ended = job.wait(TIMEOUT.total_seconds() + SECONDS)
    trained.append([samples_of(rank) for rank in ended])
    if kill.point is not None:
        assert ended[victim].exitcode == -9, ended[victim].output
    if not kill.whole_job and ended[victim].exitcode == -9:
        check_survivors(ended, victim, kill)
    last_step = check_all_whole(folder)
    # On the same file system, whatever it cannot do, but not killed again.
    spared = None if killed_at is None else (*killed_at[:2], 0)
    again = Job(tmp_path / "again", kill.world_size, train, str(folder), kill.arguments, spared).wait(SECONDS)
    for rank in again:
        assert rank.exitcode == 0, rank.output
        # Training from the beginning would come to the same parameters.
        assert f"begins after step {last_step}." in rank.output, rank.output
    check_all_whole(folder)
    trained.append([samples_of(rank) for rank in again])
    begun = last_step * MICRO_BATCHES[kill.strategy]
    for rank in everybody:
        check_samples([attempt[rank] for attempt in trained], begun, reference.samples[rank])
    assert_same(torch.load(folder / "result.pt"), reference.parameters)
    assert not list(folder.glob("*-replaced*"))


def test_three_days_hit_every_point() -> None:
    for today in range(739_000, 739_014):
        days = [seeds(10 * day, 10)[1:] for day in range(today, today + 3)]
        assert {Kill.drawn(seed).point for of_day in days for seed in of_day} == {*POINTS, None}


def samples_of(rank: Ended) -> Samples:
    lines = re.findall(r"^trains (\d+) on ([\d ]+)$", rank.output, re.M)
    return {int(batch): [int(sample) for sample in samples.split()] for batch, samples in lines}


def check_samples(attempts: Sequence[Samples], begun: int, reference: Samples) -> None:
    """Those that count are the uninterrupted training's, each batch once and in its place.

    Args:
        attempts: Of each job of one rank.
        begun: The batch with which the last one begins; what others had trained on from there on is lost.
        reference: The uninterrupted training's.
    """
    *lost, last = attempts
    assert list(last) == list(range(begun, len(reference)))
    counted = {batch: samples for attempt in lost for batch, samples in attempt.items() if batch < begun} | last
    assert counted == reference
    for attempt in lost:
        assert attempt == {batch: reference[batch] for batch in attempt}


def check_survivors(ended: Sequence[Ended], victim: int, kill: Kill) -> None:
    """They have ended by an error that names the rank that is missing, unless they had nothing left to do with it."""
    for rank, survivor in enumerate(ended):
        if rank == victim or survivor.exitcode == 0:
            continue
        assert survivor.exitcode == 1, survivor.output
        # For a rank that has said where it is and has not connected, Gloo waits five timeouts.
        timeouts = 5 if "Gloo connectFullMesh failed" in survivor.output else 1
        assert survivor.seconds_after_first < timeouts * TIMEOUT.total_seconds() + 15
        if "in init_process_group" in survivor.output:
            # Ranks that have not joined know nothing of each other: the error is torch's.
            continue
        named = {int(one) for found in NAMES.findall(survivor.output) for one in re.findall(r"\d+", found)}
        # With rank 0 that gave up, the store may be gone that knows of the others.
        assert victim in named or (kill.tcp and kill.world_size > 2 and 0 in named), survivor.output


NAMES = re.compile(r"[Rr]anks? ([\d, ]+) did not")


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


@pytest.mark.slow
def test_every_point_can_be_put_in() -> None:
    """They are drawn at random, so one that does not exist would be noticed late."""
    program = "from tests.faults.points import POINTS\nfor put in POINTS.values(): put(lambda: None)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=120)
