"""A training that goes on within an epoch is the one that did not stop, with any ordinary data loader."""

import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import lightning_parstrat
from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.data.rows import (
    ARGUMENTS,
    BATCH,
    BATCHES,
    ENDS,
    HOOKS,
    KINDS,
    OWN,
    QUICK,
    ROWS,
    SAMPLERS,
    SAMPLES,
    STATEFUL,
    STATEFUL_HOOKS,
    THREE,
    TOGETHER,
    UNSIZED,
    Dealt,
    Numbered,
    Permuted,
    Row,
    loader,
    shuffled,
)
from tests.strategies.data.trainings import Saves, Sees, differences, fit, trainer_and_module
from tests.strategies.parity import make_trainer
from tests.strategies.test_dataloaders import workers_allowed
from tests.strategies.zoo import Stream

TWICE = {
    **dict.fromkeys(("any hook", "in windows", "any hook, no length", "twice an epoch"), BATCHES[1:]),
    **{"ends, generator": ENDS, "in batches, draws": BATCHES[1:], "any hook, stateful": (*ENDS, BATCHES[1])},
    # Saved after an epoch's last batch, and again when the next epoch ends.
    "every other epoch": (BATCHES[1], *ENDS),
}
"""Rows whose trainings are saved in these hooks, and once more when they have resumed."""
TWICE_QUICK = ("ends, generator", "every other epoch")


def resumed(folder: str, names: list[str], twice: bool) -> dict[str, Any]:
    """For each row and save: what differs between the training that went on and the one that never stopped."""
    found: dict[str, Any] = {}
    for name in names:
        row = ROWS[name]._replace(hooks=TWICE[name], after=(0, 4, 5, 8)) if twice else ROWS[name]
        saves = Saves(f"{folder}/{name}", row.after, row.hooks)
        expected, saved = fit(row, 0), fit(row, 0, saves)
        assert saved.seen == expected.seen and distance(saved.parameters, expected.parameters) == 0
        assert saves.saved
        found.update(differences(saves.folder, row, expected, saves.saved, twice))
    return found


FIRST = (
    "workers",
    "random own, generator",
    "batch sampler",
    "cycle own",
    "accumulated own",
    "no lengths, cycled",
)
RUNS: dict[str, tuple[int, Iterable[str]]] = {
    "next sample": (2, FIRST),
    "any hook": (2, QUICK),
    "three ranks": (3, THREE),
    "twice": (2, TWICE_QUICK),
    "twice, more": (2, [name for name in TWICE if name not in TWICE_QUICK]),
    "samplers": (2, SAMPLERS),
    "together": (2, TOGETHER),
    "arguments": (2, ARGUMENTS),
    "stateful": (2, STATEFUL),
    "hooks": (2, HOOKS),
    "stateful in hooks": (2, STATEFUL_HOOKS),
    "no length": (2, UNSIZED),
    "no length alone": (1, UNSIZED),
}


@pytest.mark.parametrize("which", slow_unless(lambda which: which in list(RUNS)[:4], RUNS))
def test_a_training_goes_on_as_if_it_had_not_stopped(pool: RankPool, tmp_path: Path, which: str) -> None:
    ranks, rows = RUNS[which]
    names = [name for name in rows if which == "next sample" or name not in FIRST]
    assert pool.run(ranks, resumed, str(tmp_path), names, "twice" in which, timeout=400) == [{}] * ranks


class Stops(Callback):
    """Asks for the end of a fit after some batches."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.epoch_loop.batch_progress.total.processed == 7


def saved_at_an_early_end(folder: str, name: str) -> dict[str, Any]:
    row, found = ROWS[name], dict[str, Any]()
    expected = fit(row, 0)
    by_steps = row._replace(arguments={**row.arguments, "max_steps": expected.counts[-1], "max_epochs": -1})
    stops: dict[int, tuple[list[Callback], dict[str, Any]]] = {3: ([], {"max_steps": 3}), 7: ([Stops()], {})}
    for batches, (callbacks, arguments) in stops.items():
        place = f"{folder}/{name}, {batches}"
        saves = Saves(place, (), ("on_train_epoch_end",))
        trainer, module = trainer_and_module(row, 0, *callbacks, saves, **arguments)
        with workers_allowed():
            trainer.fit(module, row.make(), loader(8) if "val_check_interval" in row.arguments else None)
        trainer.save_checkpoint(f"{place}/after.ckpt")
        assert len(module.seen) == batches
        for resumes in (row, by_steps):
            found.update(differences(place, resumes, expected, {list(saves.saved)[-1]: batches, "after": batches}))
    return found


EARLY = ("shuffled", "workers", "no length", "twice an epoch", "stateful")


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "shuffled", EARLY))
def test_a_training_that_stops_within_an_epoch_goes_on_there(pool: RankPool, tmp_path: Path, name: str) -> None:
    assert pool.run(2, saved_at_an_early_end, str(tmp_path), name) == [{}] * 2


class FailedError(Exception):
    """Ends a training, and is caught."""


class Fails(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            raise FailedError


class Unpicklable(Dealt):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "function": lambda: None}


def saved_after_an_exception(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("shuffled", "workers", "no length"):
        row, expected = ROWS[name], fit(ROWS[name], 0)
        trainer, module = trainer_and_module(row, 0, Fails())
        with workers_allowed(), pytest.raises(FailedError):
            trainer.fit(module, row.make())
        trainer.save_checkpoint(f"{folder}/{name}/saved.ckpt")
        found.update(differences(f"{folder}/{name}", row, expected, {"saved": 3}))
    # A state that cannot be pickled ends the save, and not the training.
    trainer, module = trainer_and_module(Row(loader, OWN), 0, Fails())
    with pytest.raises(FailedError):
        trainer.fit(module, Unpicklable())
    with pytest.raises(AttributeError, match="pickle"):
        trainer.save_checkpoint(f"{folder}/unpicklable.ckpt")
    assert not os.path.exists(f"{folder}/unpicklable.ckpt")
    return found


def test_a_training_may_be_saved_after_an_exception(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, saved_after_an_exception, str(tmp_path)) == [{}, {}]


SAVED = f"{BATCHES[1]} 0.ckpt"
QUICK_SHARED = ["shuffled", "weighted", "batch sampler, injected"]
SHARED = ["by one", "workers", "user's distributed", "unknown, workers", "validated", "persistent", "a subclass of it"]
WITH_REPLACEMENT = ("unknown, workers", "weighted")


def until(folder: str, names: list[str], batch: int) -> dict[str, list[Any]]:
    """On which samples trainings were trained up to a save."""
    return {name: fit(ROWS[name], 0, Saves(f"{folder}/{name}", (batch,)), max_epochs=1).seen[:batch] for name in names}


def goes_on(folder: str, names: list[str]) -> dict[str, list[Any]]:
    return {name: fit(ROWS[name], 7, path=f"{folder}/{name}/{SAVED}", max_epochs=1).seen for name in names}


def whole_epochs(names: list[str]) -> dict[str, list[Any]]:
    return {name: fit(ROWS[name], 0, max_epochs=1).seen for name in WITH_REPLACEMENT if name in names}


def ids(of_ranks: list[Any]) -> list[int]:
    return [one for steps in of_ranks for parts in steps for part in parts for one in part or []]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ((2, 3), QUICK_SHARED),
        *(pytest.param(ranks, SHARED, marks=pytest.mark.slow) for ranks in ((2, 3), (3, 2))),
        *(pytest.param(ranks, QUICK_SHARED, marks=pytest.mark.slow) for ranks in ((2, 1), (1, 2))),
    ],
)
def test_among_other_ranks_every_sample_that_is_left_comes_once(
    pool: RankPool, tmp_path: Path, ranks: tuple[int, int], names: list[str]
) -> None:
    before, after = ranks
    trained = pool.run(before, until, str(tmp_path), names, 3, timeout=200)
    rest = pool.run(after, goes_on, str(tmp_path), names, timeout=200)
    # Which ones come more than once, a single process knows.
    (alone,) = pool.run(1, whole_epochs, names, timeout=200)
    for name in names:
        assert len({len(of_rank[name]) for of_rank in rest}) == 1
        counts = Counter(ids([of_rank[name] for of_rank in (*trained, *rest)]))
        expected = Counter(ids([alone[name]]) if name in alone else range(SAMPLES))
        assert not expected - counts, name
        # Of a batch sampler whole batches come once more, of up to five samples; of a user's class what it repeats.
        at_most = 5 * (after - 1) if name.startswith("batch") else after - 1
        padded = before - 1 if name in ("a subclass of it", "batch sampler, injected") else 0
        assert (counts - expected).total() <= at_most + padded, name


def chain(folder: str, path: str | None, save: int) -> list[Any]:
    return fit(ROWS["shuffled"], 5, Saves(folder, (save,)), path=path, max_epochs=1).seen


def test_ranks_may_change_again_and_again(pool: RankPool, tmp_path: Path) -> None:
    # 45 samples in batches of 4: 8 are trained on by two ranks, 12 and 12 by three, the rest by one.
    trained, path = [], None
    for number, ranks in enumerate((2, 3, 3)):
        folder = f"{tmp_path}/{number}"
        # How many batches are trained on in all, among whatever ranks.
        seen = pool.run(ranks, chain, folder, path, number + 1)
        trained += ids([steps[:1] for steps in seen])
        path = f"{folder}/{SAVED}"
    trained += ids(pool.run(1, chain, str(tmp_path), path, 99))
    assert sorted(trained) == list(range(SAMPLES))


def said_of_own_states(folder: str, path: str | None) -> list[str]:
    said = fit(ROWS["draws"], 0, Saves(folder, (2,)), path=path).said
    return [one for one in said if "gets that of rank 0 on all ranks" in one]


def test_loaders_with_a_state_of_their_own_cannot_share_what_is_left(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, said_of_own_states, str(tmp_path), None) == [[], []]
    (said,) = pool.run(1, said_of_own_states, str(tmp_path / "again"), f"{tmp_path}/{SAVED}")
    assert len(said) == 1


def loaded_after_resume(folder: str) -> list[int]:
    whole = fit(ROWS["shuffled"], 0, Saves(folder, (4,)))
    return [whole.loaded, fit(ROWS["shuffled"], 0, path=f"{folder}/{SAVED}").loaded]


def test_samples_that_were_trained_on_are_not_loaded_again(pool: RankPool, tmp_path: Path) -> None:
    for loaded in pool.run(2, loaded_after_resume, str(tmp_path)):
        assert loaded == [46, 23 + 23 - 16]


class DrawsOthers(Sampler[int]):
    """In each pass another order, which no random state decides."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        DrawsOthers.passes += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(DrawsOthers.passes)).tolist())

    def __len__(self) -> int:
        return SAMPLES


def others_drawn(folder: str) -> list[Any]:
    """On rank 1 alone others are drawn."""
    row = Row(lambda: loader(sampler=DrawsOthers() if dist.get_rank() else Permuted()), {**OWN, "max_epochs": 1})
    saved, resumed = fit(row, 0, Saves(folder, (4,))), fit(row, 0, path=f"{folder}/{SAVED}")
    said = [one for one in resumed.said if "draws other indices" in one and "epoch's samples again" in one]
    return [len(said), len(saved.seen), resumed.seen]


def test_an_order_that_cannot_be_drawn_again_begins_anew_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for rank, (said, batches, seen) in enumerate(pool.run(2, others_drawn, str(tmp_path))):
        assert (said, batches, len(seen)) == (rank == 0, 12, 8)
        # Of a pass from its begin, none comes twice.
        assert len(set(ids([seen]))) == 8 * BATCH


class OwnClass(DataLoader[Tensor]):
    def __iter__(self) -> Any:
        return map(torch.clone, super().__iter__())


class Plain:
    """Iterable, and nothing more."""

    def __iter__(self) -> Any:
        return iter(DataLoader(Numbered(16), batch_size=4))


def twice() -> list[Any]:
    one = loader()
    return [one, one]


LOST = {
    "(OwnClass over Numbered)": lambda: OwnClass(Numbered(), batch_size=4),
    "(DataLoader over Stream)": lambda: DataLoader(Stream(map(Numbered(100).__getitem__, range(100))), batch_size=4),
    "(Plain)": Plain,
    "used in two places, give each a separate loader": twice,
    "nothing": loader,
}


def warnings_of_lost(folder: str) -> dict[str, list[str]]:
    """What is said at two saves; then by a training that goes on from the second."""
    found = {}
    for name, make in LOST.items():
        row, own = Row(make, {**OWN, "max_epochs": 1}), f"{folder}/{len(found)}"
        saved, resumed = fit(row, 0, Saves(own, (2, 3))), fit(row, 0, path=f"{own}/{SAVED}")
        found[name] = [one for one in saved.said if "without the place of a data loader" in one]
        found[name] += [one for one in resumed.said if "begins the epoch's samples again" in one]
    return found


def test_one_warning_at_the_save_names_the_loader_that_is_lost(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, warnings_of_lost, str(tmp_path))
    assert found.pop("nothing") == []
    for name, said in found.items():
        assert name in said[0] and "StatefulDataLoader" in said[0]
        # What does not know that it has begun an epoch goes on as under `ddp`.
        assert ["its place is not in the checkpoint" in one for one in said[1:]] == [True] * ("two places" in name)


def warnings_of_hooks(folder: str) -> list[list[str]]:
    """What is said of hooks that are not called again: within an epoch, without such a hook, and at an epoch's end."""
    row, found = Row(loader, {"max_epochs": 2}), []
    for number, (hook, factors) in enumerate(((BATCHES[1], True), (BATCHES[1], False), (ENDS[1], True))):
        saves = Saves(f"{folder}/{number}", (2,), (hook,))
        callbacks = [GradientAccumulationScheduler({0: 1, 1: 2})] if factors else []
        fit(row, 0, saves, *callbacks)
        (name, *_) = saves.saved
        resumed = fit(row, 0, *callbacks, path=f"{folder}/{number}/{name}.ckpt")
        found.append([one for one in resumed.said if "does not call `on_train_epoch_start`" in one])
    return found


def test_hooks_that_are_not_called_again_are_warned_of(pool: RankPool, tmp_path: Path) -> None:
    ((within, without, at_end),) = pool.run(1, warnings_of_hooks, str(tmp_path))
    assert len(within) == 1 and "of GradientAccumulationScheduler again" in within[0]
    assert without == at_end == []


def validated_before_training(folder: str) -> list[bool]:
    row, path = Row(loader, {"max_epochs": 1}), f"{folder}/{SAVED}"
    expected = fit(row, 0, Saves(folder, (4,)))
    trainer, module = trainer_and_module(row, 0)
    trainer.validate(module, loader(8, shuffle=False), ckpt_path=path, weights_only=True)
    trainer.fit(module, row.make())
    filters = list(warnings.filters)
    trainer, resumed = trainer_and_module(row, 0)
    trainer.fit(resumed, row.make(), ckpt_path=path, weights_only=True)
    return [
        [len(step[0]) for step in module.seen] == [len(step[0]) for step in expected.seen],
        sorted(ids([module.seen])) == sorted(ids([expected.seen])),
        resumed.seen == expected.seen[4:],
        list(warnings.filters) == filters,
    ]


def test_a_run_leaves_nothing_of_its_checkpoint_to_the_next(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, validated_before_training, str(tmp_path))
    assert found == [True, True, True, True]


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


def cut_short(folder: str) -> dict[str, Any]:
    """Of each strategy what the checkpoint of an epoch counts that the end of training has cut."""
    found = {}
    for kind in (*KINDS, "ddp"):
        chosen = "ddp" if kind == "ddp" else getattr(lightning_parstrat, kind)()
        saving = ModelCheckpoint(f"{folder}/{kind}", "{epoch}", save_on_train_epoch_end=True)
        trainer = make_trainer(chosen, callbacks=[saving], max_steps=2, enable_checkpointing=True)
        trainer.fit(Sees(Row(shuffled)), shuffled())
        found[kind] = torch.load(saving.best_model_path, weights_only=True)["loops"]["fit_loop"]["epoch_progress"]
    return found


def test_an_epoch_that_was_cut_short_is_saved_as_under_ddp(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, cut_short, str(tmp_path))
    assert [found[kind] for kind in KINDS] == [found["ddp"]] * 2
