"""A checkpoint may be saved by Lightning's callbacks, by a resumed training, and by one that is told to end."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_parstrat
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.data.rows import BATCHES, ENDS, KINDS, OWN, ROWS, START, Dealt, Row, shuffled
from tests.strategies.data.trainings import Saves, Sees, differences, fit
from tests.strategies.parity import make_trainer

AFTER = (0, 4, 5, 8)


def saved_by_checkpoints(folder: str) -> dict[str, Any]:
    """Saved by Lightning's own callback, after the validation or after that at the end of the epoch."""
    found: dict[str, Any] = {}
    for kind, at_train_end in zip(KINDS, (False, True), strict=True):
        row = ROWS["any hook"]._replace(kind=kind, strategy={})
        saving = ModelCheckpoint(
            f"{folder}/{kind}",
            "{epoch}",
            save_top_k=-1,
            save_on_train_epoch_end=at_train_end,
            enable_version_counter=False,
        )
        expected = fit(row, 0, saving, enable_checkpointing=True)
        found.update(differences(f"{folder}/{kind}", row, expected, {"epoch=0": 5, "epoch=1": 10}))
    return found


def test_a_checkpoint_of_every_validated_epoch_goes_on(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, saved_by_checkpoints, str(tmp_path)) == [{}, {}]


def resumed_twice(folder: str, saves: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Resumes from every save, saves when that training starts or has trained a batch, and resumes from there."""
    found: dict[str, Any] = {}
    for name, hooks in saves.items():
        row, saving = ROWS[name], Saves(f"{folder}/{name}", AFTER, hooks)
        expected = fit(row, 0, saving)
        for save, batches in saving.saved.items():
            # In a training that has come to its end, nothing starts.
            if batches < len(expected.seen):
                again = Saves(f"{saving.folder}/from {save}", AFTER, (START, *hooks[2:]))
                fit(row, 50, again, path=f"{saving.folder}/{save}.ckpt")
                saved = {**again.saved, f"{START} 0": batches}
                assert len(saved) == len(again.saved)
                found.update(differences(again.folder, row, expected, saved))
    return found


TWICE = ("any hook", "in windows", "any hook, no length", "twice an epoch", "in batches, draws")


@pytest.mark.parametrize(
    "saves",
    [
        {"ends, generator": ENDS},
        pytest.param(
            {**dict.fromkeys(TWICE, BATCHES[1:]), "any hook, stateful": (*ENDS, BATCHES[1])}, marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "slow"],
)
def test_a_resumed_training_may_be_saved_when_it_starts(
    pool: RankPool, tmp_path: Path, saves: dict[str, tuple[str, ...]]
) -> None:
    assert pool.run(2, resumed_twice, str(tmp_path), saves, timeout=400) == [{}, {}]


class Told(Callback):
    """Ranks are told to end, in the middle of a batch."""

    def __init__(self, batch: int, *ranks: int) -> None:
        self.batch, self.ranks = batch, ranks

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)


TOLD = [
    # The row, when which ranks are told, and how many batches are trained on by then.
    ("twice an epoch", Told(1, 0, 1), 2),
    ("validated in windows", Told(2, 0, 1), 4),
    ("in batches, draws", Told(4, 1), 5),
    ("ends, stateful", Told(1, 1), 2),
    ("any hook", Told(5, 1), 6),
]


def preempted(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, told, batches in TOLD:
        row, elsewhere = ROWS[name], f"{folder}/{name}"
        expected = fit(row, 0)
        saving = ModelCheckpoint(elsewhere, save_last=True, save_top_k=0, enable_version_counter=False)
        with pytest.raises(SystemExit) as ended:
            fit(row, 0, saving, told, enable_checkpointing=True)
        assert ended.value.code == 143
        found.update(differences(elsewhere, row, expected, {"last": batches}))
    return found


def test_sigterm_saves_the_last_where_training_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """Told in a batch, agreed on in it, saved when the next has been fetched, which counts not."""
    assert pool.run(2, preempted, str(tmp_path)) == [{}, {}]


class Unpicklable(Dealt):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "function": lambda: None}


class TriesToSave(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            with pytest.raises(AttributeError, match="pickle"):
                trainer.save_checkpoint(f"{self.folder}/a.ckpt")


def trained_unpicklable(folder: str) -> float:
    expected = fit(Row(lambda: Dealt(20), OWN), 0)
    actual = fit(Row(lambda: Unpicklable(20), OWN), 0, TriesToSave(folder))
    return distance(actual.parameters, expected.parameters)


def test_a_state_that_cannot_be_pickled_ends_the_save_and_not_the_training(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, trained_unpicklable, str(tmp_path)) == [0.0, 0.0]
    assert not list(tmp_path.iterdir())


def epochs_of(path: str | Path) -> dict[str, Any]:
    """How Lightning's loop over epochs counts, in a checkpoint."""
    progress: dict[str, Any] = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_progress"]
    return progress


def cut_short(folder: str) -> dict[str, Any]:
    """Of each strategy what the checkpoint of an epoch counts that the end of training has cut."""
    found = {}
    for kind in (*KINDS, "ddp"):
        chosen = "ddp" if kind == "ddp" else getattr(lightning_parstrat, kind)()
        saving = ModelCheckpoint(f"{folder}/{kind}", "{epoch}", save_on_train_epoch_end=True)
        trainer = make_trainer(chosen, callbacks=[saving], max_steps=2, enable_checkpointing=True)
        trainer.fit(Sees(Row(shuffled)), shuffled())
        found[kind] = epochs_of(saving.best_model_path)
    return found


def test_an_epoch_that_was_cut_short_is_saved_as_under_ddp(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, cut_short, str(tmp_path))
    assert [found[kind] for kind in KINDS] == [found["ddp"]] * 2
