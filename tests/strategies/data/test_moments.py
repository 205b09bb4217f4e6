"""A checkpoint may be saved in any hook: the training that goes on from it is the one that did not stop, to the bit."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.data.rows import OWN, Dealt, Row, Unsized, loader, own_generator, stateful, without_length
from tests.strategies.data.test_positions import KINDS, Training, fit

START = "on_train_start"
ENDS = ("on_validation_end", "on_train_epoch_end")
BEGINS = (START, "on_train_epoch_start")
BATCHES = ("on_train_batch_start", "on_train_batch_end")
STEPS = ("on_before_backward", "on_before_optimizer_step")

SAVED_AFTER = (0, 1, 4, 5, 8)
"""Batches after which hooks of a batch save: of three epochs of five."""


class SavesInHooks(Callback):
    """Saves when Lightning calls one of some hooks, and notes how many batches were trained on by then.

    Args:
        folder: Where to.
        hooks: In which.
    """

    def __init__(self, folder: str, hooks: tuple[str, ...]) -> None:
        self.folder = folder
        self.saved: dict[str, int] = {}
        for hook in hooks:
            setattr(self, hook, self._saving_in(hook))

    def _saving_in(self, hook: str) -> Callable[..., None]:
        def save(trainer: Trainer, *_: Any) -> None:
            batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
            if not trainer.sanity_checking and (hook not in (*BATCHES, *STEPS) or batches in SAVED_AFTER):
                name = f"{hook} {sum(one.startswith(hook) for one in self.saved)}"
                self.saved[name] = batches
                trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

        return save


def differences(
    folder: str, kind: str, row: Row, expected: Training, saved: Mapping[str, int], *callbacks: Callback
) -> dict[str, Any]:
    """For each save: what differs between the training that went on from it and the one that never stopped."""
    found = {}
    window = row.arguments.get("accumulate_grad_batches", 1)
    for name, batches in saved.items():
        actual = fit(kind, row, 99 + dist.get_rank(), *callbacks, path=f"{folder}/{name}.ckpt")
        begun = len(expected.seen) - len(actual.seen)
        same = batches - window < begun <= batches and actual.seen == expected.seen[begun:]
        difference = distance(actual.parameters, expected.parameters)
        if not same or difference != 0:
            found[f"{folder} {name}"] = (batches, begun, same, difference)
    return found


class Case(NamedTuple):
    """A training that is saved in some hooks.

    Attributes:
        make: Makes its loader: five batches on each rank, shuffled where it can be.
        hooks: In which.
        arguments: The Trainer's, beside those that validate after every epoch.
    """

    make: Callable[[], Any]
    hooks: tuple[str, ...]
    arguments: Mapping[str, Any] = MappingProxyType({})

    @property
    def row(self) -> Row:
        return Row(self.make, {**OWN, "max_epochs": 3, "val_check_interval": 1.0, **self.arguments})


def shuffled(**arguments: Any) -> Any:
    return loader(20, **arguments)


def generated() -> Any:
    return shuffled(generator=own_generator())


CASES = {
    "distributed": Case(shuffled, ENDS, {"use_distributed_sampler": True}),
    "generator": Case(generated, (*ENDS, BATCHES[1])),
    "stateful that draws": Case(lambda: Dealt(20), (*BATCHES, *STEPS)),
    "shuffled": Case(shuffled, (*BEGINS, *ENDS, *BATCHES)),
    "every other epoch": Case(shuffled, (*ENDS, *BATCHES), {"check_val_every_n_epoch": 2}),
    "twice an epoch": Case(shuffled, (*ENDS, *BATCHES), {"val_check_interval": 2}),
    "accumulated": Case(shuffled, (*BEGINS, *ENDS, BATCHES[1]), {"accumulate_grad_batches": 2}),
    "validated in windows": Case(
        shuffled, (ENDS[0], *BATCHES), {"accumulate_grad_batches": 2, "val_check_interval": 2}
    ),
    "no length": Case(lambda: loader(sampler=Unsized(20)), (*BEGINS, *ENDS, *BATCHES)),
    "no length, accumulated": Case(lambda: loader(sampler=Unsized(20)), BATCHES, {"accumulate_grad_batches": 2}),
    "stateful": Case(lambda: stateful(20), (*BEGINS, *ENDS, *BATCHES)),
    "stateful that draws, beside": Case(lambda: [shuffled(), Dealt(9)], BATCHES),
    "stateful, accumulated": Case(lambda: Dealt(20), (*BATCHES, STEPS[0]), {"accumulate_grad_batches": 2}),
    "stateful, validated": Case(lambda: Dealt(20), (ENDS[0], *BATCHES), {"val_check_interval": 2}),
    "stateful, no length": Case(lambda: without_length(20), (*BEGINS, *ENDS, *BATCHES, *STEPS)),
    "stateful, no length, beside": Case(lambda: [generated(), stateful(5), without_length(9)], BATCHES),
    "workers": Case(lambda: shuffled(num_workers=1), ENDS),
    "workers, generator": Case(lambda: shuffled(num_workers=1, generator=own_generator()), ENDS),
    "persistent": Case(lambda: shuffled(num_workers=1, persistent_workers=True), ENDS),
}
NAMES = list(CASES)
GROUPS = {"quick": NAMES[:3], "by batches": NAMES[3:8], "no length": NAMES[8:10], "stateful": NAMES[10:16]}
GROUPS["workers"] = NAMES[16:]


def resumed(folder: str, names: list[str]) -> dict[str, Any]:
    """What differs; nothing is expected to."""
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        # Where loaders stand has nothing to do with the strategy: each under one.
        row, kind = CASES[name].row, KINDS[number % 2]
        expected = fit(kind, row, 0)
        saving = SavesInHooks(f"{folder}/{name}", CASES[name].hooks)
        saved = fit(kind, row, 0, saving)
        assert saved.seen == expected.seen and distance(saved.parameters, expected.parameters) == 0
        assert saving.saved
        found.update(differences(saving.folder, kind, row, expected, saving.saved))
    return found


@pytest.mark.parametrize(
    ("which", "ranks"),
    [("quick", 2), *(pytest.param(which, 2, marks=pytest.mark.slow) for which in list(GROUPS)[1:]), ("no length", 1)],
)
def test_a_training_goes_on_from_a_save_in_any_hook(pool: RankPool, tmp_path: Path, which: str, ranks: int) -> None:
    assert pool.run(ranks, resumed, str(tmp_path), GROUPS[which], timeout=300) == [{}] * ranks


def saved_by_checkpoints(folder: str) -> dict[str, Any]:
    """Saved by Lightning's own callback, after the validation or after that at the end of the epoch."""
    row, found = CASES["shuffled"].row, {}
    for kind, at_train_end in zip(KINDS, (False, True), strict=True):
        saving = ModelCheckpoint(
            f"{folder}/{kind}",
            "{epoch}",
            save_top_k=-1,
            save_on_train_epoch_end=at_train_end,
            enable_version_counter=False,
        )
        expected = fit(kind, row, 0, saving, enable_checkpointing=True)
        found.update(differences(f"{folder}/{kind}", kind, row, expected, {"epoch=0": 5, "epoch=1": 10}))
    return found


def test_a_checkpoint_of_every_validated_epoch_goes_on(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, saved_by_checkpoints, str(tmp_path)) == [{}, {}]


def resumed_twice(folder: str, saves: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Resumes from every save, saves when that training starts or begins a batch, and resumes from there."""
    found: dict[str, Any] = {}
    for name, hooks in saves.items():
        row, kind = CASES[name].row, KINDS[0]
        saving = SavesInHooks(f"{folder}/{name}", hooks)
        expected = fit(kind, row, 0, saving)
        for save, batches in saving.saved.items():
            # In a training that has come to its end, nothing starts.
            if batches < len(expected.seen):
                again = SavesInHooks(f"{saving.folder}/from {save}", (START,))
                fit(kind, row, 50, again, path=f"{saving.folder}/{save}.ckpt")
                assert list(again.saved) == [f"{START} 0"]
                found.update(differences(again.folder, kind, row, expected, dict.fromkeys(again.saved, batches)))
    return found


TWICE = ("shuffled", "accumulated", "no length", "twice an epoch", "stateful that draws")


@pytest.mark.parametrize(
    "saves", [{"generator": ENDS}, pytest.param(dict.fromkeys(TWICE, BATCHES[1:]), marks=pytest.mark.slow)]
)
def test_a_resumed_training_may_be_saved_when_it_starts(
    pool: RankPool, tmp_path: Path, saves: dict[str, tuple[str, ...]]
) -> None:
    assert pool.run(2, resumed_twice, str(tmp_path), saves, timeout=300) == [{}, {}]


class Validations(Callback):
    """Counts them, and is saved with the count."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.after.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"after": list(self.after)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.after = state["after"]


def validations_of_resumed(folder: str, name: str) -> list[Any]:
    """Each validation, in what order steps and validations came, of the whole training and of the resumed ones."""
    row, kind = CASES[name].row, KINDS[0]
    whole, saving = Validations(), SavesInHooks(folder, (BATCHES[1], ENDS[0]))
    fit(kind, row, 0, whole, saving)
    found = [whole.after]
    for save in saving.saved:
        resumed, again = Validations(), SavesInHooks(f"{folder}/from {save}", (START, ENDS[0]))
        fit(kind, row, 9, resumed, again, path=f"{folder}/{save}.ckpt")
        found.append(resumed.after)
        for second in again.saved:
            more = Validations()
            fit(kind, row, 8, more, path=f"{again.folder}/{second}.ckpt")
            found.append(more.after)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "validations"), [("shuffled", 3), ("twice an epoch", 6)])
def test_no_validation_is_left_out_or_made_twice(pool: RankPool, tmp_path: Path, name: str, validations: int) -> None:
    (found,) = pool.run(1, validations_of_resumed, str(tmp_path), name, timeout=300)
    assert len(found[0]) == validations
    assert found == [found[0]] * len(found)


class Told(Callback):
    """Is told to end, in a batch after which there is a validation."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(folder: str) -> dict[str, Any]:
    found = {}
    for name, batches in (("twice an epoch", 2), ("validated in windows", 4)):
        row, kind = CASES[name].row, KINDS[0]
        expected = fit(kind, row, 0)
        saving = ModelCheckpoint(f"{folder}/{name}", save_last=True, save_top_k=0, enable_version_counter=False)
        with pytest.raises(SystemExit):
            fit(kind, row, 0, saving, Told(), enable_checkpointing=True)
        found.update(differences(f"{folder}/{name}", kind, row, expected, {"last": batches}))
    return found


def test_a_training_that_was_preempted_in_a_validated_batch_goes_on(pool: RankPool, tmp_path: Path) -> None:
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
    expected = fit(KINDS[0], Row(lambda: Dealt(20), OWN), 0)
    actual = fit(KINDS[0], Row(lambda: Unpicklable(20), OWN), 0, TriesToSave(folder))
    return distance(actual.parameters, expected.parameters)


def test_a_state_that_cannot_be_pickled_ends_the_save_and_not_the_training(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, trained_unpicklable, str(tmp_path)) == [0.0, 0.0]
    assert not list(tmp_path.iterdir())
