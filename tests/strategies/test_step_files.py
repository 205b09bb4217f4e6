"""Which files of the package a steady step enters, in which order: few enough to read."""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_parstrat
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import looks_at_no_gradient, train

PACKAGE = Path(lightning_parstrat.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
STEADY = 5
MOST = {"zero1_custom": 30, "ddp_tuned": 22}
"""Files, by flag."""


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[RankPool]:
    """Ranks in which no other test has left an engine, whose hooks would be seen."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@looks_at_no_gradient
class Traces(Callback):
    """Notes what the training's thread calls from one batch's start to the next one's."""

    def __init__(self) -> None:
        self.called: dict[tuple[str, str], None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.called.setdefault((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self.note if batch_idx == STEADY else None)


def calls_of_a_step(flag: str) -> list[tuple[str, str]]:
    """Files and functions in the order in which a steady step enters them first, on this rank."""
    traces = Traces()
    train(zoo.MLP, flag, callbacks=[traces], gradient_clip_val=1.0)
    return list(traces.called)


def test_a_steady_step_enters_few_files(fresh_pool: RankPool) -> None:
    for flag, most in MOST.items():
        for calls in fresh_pool.run(2, calls_of_a_step, flag):
            files = {file for file, _ in calls}
            assert 5 < len(files) <= most, sorted(files)


def rows_of_a_step() -> list[list[tuple[str, str]]]:
    """The functions in each row of the page's table of a step, but for rows that say "if"."""
    section = PAGE.read_text().split("## One training step of zero1_custom\n")[1].split("\n## ")[0]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("| ") and ".py`" in row]
    rows = [row for row in rows if " if " not in row[1]]
    names = [([quoted.split(".")[-1] for quoted in re.findall(r"`([\w.]+)`", row[3])], row[2]) for row in rows]
    return [[(file, one) for file in re.findall(r"`([\w/]+\.py)`", files) for one in of] for of, files in names]


def test_the_table_of_a_step_is_that_of_a_step(fresh_pool: RankPool) -> None:
    calls = fresh_pool.run(2, calls_of_a_step, "zero1_custom")[0]
    rows = rows_of_a_step()
    places = [[calls.index(one) for one in row if one in calls] for row in rows]
    assert len(rows) > 10 and all(places), [row for row, found in zip(rows, places, strict=True) if not found]
    # A trace begins within the table, whose begin it comes to once.
    firsts = list(map(min, places))
    turns = [rows[n] for n, (earlier, later) in enumerate(itertools.pairwise(firsts)) if later < earlier]
    assert len(turns) <= 1, turns
