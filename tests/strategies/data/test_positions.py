"""A training that goes on within an epoch is the one that did not stop, with any ordinary data loader."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

import lightning_parstrat
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.data.rows import (
    ARGUMENTS,
    BATCH,
    OWN,
    ROWS,
    SAMPLERS,
    SAMPLES,
    STATEFUL,
    TOGETHER,
    Numbered,
    Permuted,
    Row,
    loader,
)
from tests.strategies.parity import make_trainer
from tests.strategies.test_dataloaders import workers_allowed

KINDS = ("ZeRO1Strategy", "TunedDDPStrategy")


class Sees(LightningModule):
    """Draws random numbers in every step, also of a validation, and notes which samples it was trained on."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Dropout(0.5), nn.ReLU(), nn.Linear(24, 1))
        self.row = row
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.row.make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
        samples = [None if part is None else part.reshape(-1, 8) for part in parts]
        self.seen.append([None if part is None else part[:, 0].int().tolist() for part in samples])
        return self.layers(torch.cat([part for part in samples if part is not None])).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        noise = torch.randn_like(batch)
        self.log("val", self.layers(batch + noise).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saves(Callback):
    """Saves after some of the batches."""

    def __init__(self, folder: str, batches: tuple[int, ...]) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batch in self.batches:
            trainer.save_checkpoint(f"{self.folder}/{batch}.ckpt")


class Training(NamedTuple):
    """What a training came to: on which samples, step by step, and with which parameters; and what it said."""

    seen: list[Any]
    parameters: list[Tensor]
    loaded: int
    said: list[str]


def trainer_and_module(kind: str, row: Row, seed: int, *callbacks: Callback, **more: Any) -> tuple[Trainer, Sees]:
    torch.manual_seed(seed)
    module = Sees(row)
    strategy = getattr(lightning_parstrat, kind)(bucket_cap_mb=0.001)
    return make_trainer(strategy, callbacks=list(callbacks), **{"max_epochs": 2, **row.arguments, **more}), module


def fit(kind: str, row: Row, seed: int, *callbacks: Callback, path: str | None = None, **more: Any) -> Training:
    trainer, module = trainer_and_module(kind, row, seed, *callbacks, **more)
    validation = loader(8) if "val_check_interval" in {**row.arguments, **more} else None
    Numbered.loaded = 0
    with workers_allowed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, None if row.from_module else row.make(), validation, ckpt_path=path, weights_only=True)
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    return Training(module.seen, parameters, Numbered.loaded, [str(one.message) for one in caught])


def resumed(folder: str, names: list[str]) -> dict[str, Any]:
    """For each row and save: what differs between the training that went on and the one that never stopped."""
    found = {}
    for name in names:
        row, number = ROWS[name], list(ROWS).index(name)
        # Under DDP ranks with different numbers of batches wait for each other forever.
        kind = KINDS[number % 2 if "uneven" not in name else 0]
        expected = fit(kind, row, 0)
        # All batches of rows alike are too many: every fourth, of each row others.
        saves = tuple(range(1 + number % 4, len(expected.seen), 4))
        saved = fit(kind, row, 0, Saves(f"{folder}/{name}", saves))
        if saved.seen != expected.seen or distance(saved.parameters, expected.parameters) != 0:
            found[f"{name}, saved"] = saved.seen
        window = row.arguments.get("accumulate_grad_batches", 1)
        for batch in saves:
            actual = fit(kind, row, 99 + dist.get_rank(), path=f"{folder}/{name}/{batch}.ckpt")
            begun = len(expected.seen) - len(actual.seen)
            is_same = batch - window < begun <= batch and actual.seen == expected.seen[begun:]
            difference = distance(actual.parameters, expected.parameters)
            doubts = [one for one in actual.said if "resuming from a checkpoint" in one or "anew" in one]
            if not is_same or difference != 0 or doubts:
                found[f"{name}, {batch}"] = (begun, actual.seen, expected.seen, difference, doubts)
    return found


QUICK = ["workers", "random own, generator", "batch sampler", "cycle own", "accumulated own", "no lengths, cycled"]


GROUPS = {"samplers": SAMPLERS, "together": TOGETHER, "arguments": ARGUMENTS, "stateful": STATEFUL}


@pytest.mark.parametrize("which", ["quick", *(pytest.param(name, marks=pytest.mark.slow) for name in GROUPS)])
def test_a_training_goes_on_with_the_next_sample(pool: RankPool, tmp_path: Path, which: str) -> None:
    names = QUICK if which == "quick" else [name for name in GROUPS[which] if name not in QUICK]
    assert pool.run(2, resumed, str(tmp_path), names, timeout=300) == [{}, {}]


class FailedError(Exception):
    """Ends a training, and is caught."""


class Fails(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            raise FailedError


def saved_after_an_exception(folder: str) -> dict[str, bool]:
    found = {}
    for number, name in enumerate(("shuffled", "workers", "no length")):
        row, path, kind = ROWS[name], f"{folder}/{name}.ckpt", KINDS[number % 2]
        expected = fit(kind, row, 0)
        trainer, module = trainer_and_module(kind, row, 0, Fails())
        with workers_allowed(), pytest.raises(FailedError):
            trainer.fit(module, row.make())
        trainer.save_checkpoint(path)
        actual = fit(kind, row, 1, path=path)
        same = distance(actual.parameters, expected.parameters) == 0
        found[name] = actual.seen == expected.seen[3:] and same
    return found


def test_a_training_may_be_saved_after_an_exception(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(2, saved_after_an_exception, str(tmp_path)):
        assert found == {"shuffled": True, "workers": True, "no length": True}


QUICK_SHARED = ["shuffled", "weighted", "batch sampler, injected"]
SHARED = ["by one", "workers", "user's distributed", "unknown, workers", "validated", "persistent", "a subclass of it"]
WITH_REPLACEMENT = ("unknown, workers", "weighted")


def until(folder: str, names: list[str], batch: int) -> dict[str, list[Any]]:
    """On which samples trainings were trained up to a save."""
    return {
        name: fit(KINDS[number % 2], ROWS[name], 0, Saves(f"{folder}/{name}", (batch,)), max_epochs=1).seen[:batch]
        for number, name in enumerate(names)
    }


def goes_on(folder: str, names: list[str], batch: int) -> dict[str, list[Any]]:
    return {
        name: fit(KINDS[number % 2], ROWS[name], 7, path=f"{folder}/{name}/{batch}.ckpt", max_epochs=1).seen
        for number, name in enumerate(names)
    }


def whole_epochs(names: list[str]) -> dict[str, list[Any]]:
    return {name: fit(KINDS[0], ROWS[name], 0, max_epochs=1).seen for name in WITH_REPLACEMENT if name in names}


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
    rest = pool.run(after, goes_on, str(tmp_path), names, 3, timeout=200)
    # Which ones come more than once, a single process knows.
    (alone,) = pool.run(1, whole_epochs, names)
    for name in names:
        assert len({len(of_rank[name]) for of_rank in rest}) == 1
        counts = Counter(ids([of_rank[name] for of_rank in (*trained, *rest)]))
        expected = Counter(ids([alone[name]]) if name in alone else range(SAMPLES))
        assert not expected - counts, name
        # Of a batch sampler whole batches come once more, of up to five samples; of a user's class what it repeats.
        at_most = 5 * (after - 1) if name.startswith("batch") else after - 1
        padded = before - 1 if name in ("a subclass of it", "batch sampler, injected") else 0
        assert (counts - expected).total() <= at_most + padded, name


def chain(folder: str, path: int | None, save: int) -> list[Any]:
    at = None if path is None else f"{folder}/{path}.ckpt"
    return fit(KINDS[0], ROWS["shuffled"], 5, Saves(folder, (save,)), path=at, max_epochs=1).seen


def test_ranks_may_change_again_and_again(pool: RankPool, tmp_path: Path) -> None:
    # 45 samples in batches of 4: 8 are trained on by two ranks, 12 and 12 by three, the rest by one.
    trained = []
    for path, ranks in enumerate((2, 3, 3)):
        seen = pool.run(ranks, chain, str(tmp_path), path or None, path + 1)
        trained += ids([steps[:1] for steps in seen])
    trained += ids(pool.run(1, chain, str(tmp_path), 3, 99))
    assert sorted(trained) == list(range(SAMPLES))


def said_of_own_states(folder: str, path: str | None) -> list[str]:
    said = fit(KINDS[0], ROWS["draws"], 0, Saves(folder, (2,)), path=path).said
    return [one for one in said if "gets that of rank 0 on all ranks" in one]


def test_loaders_with_a_state_of_their_own_cannot_share_what_is_left(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, said_of_own_states, str(tmp_path), None) == [[], []]
    (said,) = pool.run(1, said_of_own_states, str(tmp_path / "again"), f"{tmp_path}/2.ckpt")
    assert len(said) == 1


def loaded_after_resume(folder: str) -> list[int]:
    row = ROWS["shuffled"]
    whole = fit(KINDS[0], row, 0, Saves(folder, (4,)))
    return [whole.loaded, fit(KINDS[0], row, 0, path=f"{folder}/4.ckpt").loaded]


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
    saved = fit(KINDS[0], row, 0, Saves(folder, (4,)))
    resumed = fit(KINDS[0], row, 0, path=f"{folder}/4.ckpt")
    said = [one for one in resumed.said if "draws again are others" in one and "begins the epoch's samples anew" in one]
    return [len(said), len(saved.seen), resumed.seen]


def test_an_order_that_cannot_be_drawn_again_begins_anew_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for rank, (said, batches, seen) in enumerate(pool.run(2, others_drawn, str(tmp_path))):
        assert (said, batches, len(seen)) == (rank == 0, 12, 8)
        # Of a pass from its begin, none comes twice.
        assert len(set(ids([seen]))) == 8 * BATCH


class OwnClass(DataLoader[Tensor]):
    def __iter__(self) -> Any:
        return map(torch.clone, super().__iter__())


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return map(Numbered(100).__getitem__, range(100))


class Plain:
    """Iterable, and nothing more."""

    def __iter__(self) -> Any:
        return iter(DataLoader(Numbered(16), batch_size=4))


LOST = {
    "(OwnClass over Numbered)": lambda: OwnClass(Numbered(), batch_size=4),
    "(DataLoader over Stream)": lambda: DataLoader(Stream(), batch_size=4),
    "(Plain)": Plain,
    "nothing": loader,
}


def warnings_of_lost(folder: str) -> dict[str, list[str]]:
    found = {}
    for name, make in LOST.items():
        training = fit(KINDS[0], Row(make, {**OWN, "max_epochs": 1}), 0, Saves(folder, (2, 3)))
        found[name] = [one for one in training.said if "cannot be told where it stands" in one]
    return found


def test_one_warning_at_the_save_names_the_loader_that_is_lost(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, warnings_of_lost, str(tmp_path))
    assert found.pop("nothing") == []
    for name, (said,) in found.items():
        assert name in said and "StatefulDataLoader" in said


def loader_in_and_after_training() -> list[bool]:
    given = loader(generator=torch.Generator())
    before = dict(vars(given))
    seen: list[bool] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            copied = copy.deepcopy(trainer.train_dataloader)
            seen.append(trainer.train_dataloader is given and isinstance(given.batch_sampler, BatchSampler))
            seen.append(type(copied.batch_sampler) is BatchSampler and len(copied) == len(given))

        def on_train_epoch_end(self, *_: Any) -> None:
            # It is the user's own that gets it.
            given.batch_sampler.batch_size = 9

    fit(KINDS[1], Row(lambda: given, OWN), 0, Looks())
    seen.append([len(batch) for batch in given] == [9] * 5 and len(given) == 5)
    return [*seen, {**vars(given), "_iterator": None} == before]


def test_the_users_loader_has_its_own_sampler_again(pool: RankPool) -> None:
    (found,) = pool.run(1, loader_in_and_after_training)
    assert found == [True] * len(found) and len(found) > 2


def validated_before_training(folder: str) -> list[bool]:
    row = Row(loader, {"max_epochs": 1})
    expected = fit(KINDS[0], row, 0, Saves(folder, (4,)))
    trainer, module = trainer_and_module(KINDS[0], row, 0)
    trainer.validate(module, loader(8, shuffle=False), ckpt_path=f"{folder}/4.ckpt", weights_only=True)
    trainer.fit(module, row.make())
    filters = list(warnings.filters)
    trainer, resumed = trainer_and_module(KINDS[0], row, 0)
    trainer.fit(resumed, row.make(), ckpt_path=f"{folder}/4.ckpt", weights_only=True)
    return [
        [len(step[0]) for step in module.seen] == [len(step[0]) for step in expected.seen],
        sorted(ids([module.seen])) == sorted(ids([expected.seen])),
        resumed.seen == expected.seen[4:],
        list(warnings.filters) == filters,
    ]


def test_a_run_leaves_nothing_of_its_checkpoint_to_the_next(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, validated_before_training, str(tmp_path))
    assert found == [True, True, True, True]


def trained_beside_a_stream(folder: str, path: str | None) -> list[Any]:
    row = Row(lambda: {"a": loader(), "b": DataLoader(Stream(), BATCH)}, {"max_epochs": 1, "limit_train_batches": 12})
    return [step[0] for step in fit(KINDS[0], row, 0, Saves(folder, (3,)), path=path).seen]


def test_ranks_may_change_where_a_loader_has_no_length(pool: RankPool, tmp_path: Path) -> None:
    (before,) = pool.run(1, trained_beside_a_stream, str(tmp_path), None)
    after = pool.run(2, trained_beside_a_stream, str(tmp_path), f"{tmp_path}/3.ckpt")
    # 45 - 12 samples are left, in five batches of each rank; then the loader begins again, as the stream goes on.
    first = [one for steps in after for step in steps[:5] for one in step]
    assert set(first) == set(range(SAMPLES)) - {one for step in before[:3] for one in step}
