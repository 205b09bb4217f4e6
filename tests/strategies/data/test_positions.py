"""A training that goes on within an epoch is the one that did not stop, with any ordinary data loader."""

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

import lightning_parstrat
from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.data.rows import BATCH, ROWS, SAMPLES, Numbered, Row, Stream, loader
from tests.strategies.parity import make_trainer
from tests.strategies.test_dataloaders import workers_allowed


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
    """Saves after some of the batches, and before the second is trained on."""

    def __init__(self, folder: str, batches: tuple[int, ...]) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batch in self.batches:
            trainer.save_checkpoint(f"{self.folder}/{batch}.ckpt")


class Training(NamedTuple):
    """What a training came to: on which samples, step by step, and with which parameters."""

    seen: list[Any]
    parameters: list[Tensor]
    loaded: int


def fit(kind: str, row: Row, seed: int, *callbacks: Callback, path: str | None = None, **more: Any) -> Training:
    torch.manual_seed(seed)
    module = Sees(row)
    arguments = {"max_epochs": 2, **row.arguments, **more}
    strategy = getattr(lightning_parstrat, kind)(bucket_cap_mb=0.001)
    trainer = make_trainer(strategy, callbacks=list(callbacks), **arguments)
    validation = loader(8) if "val_check_interval" in arguments else None
    Numbered.loaded = 0
    with workers_allowed():
        trainer.fit(module, None if row.from_module else row.make(), validation, ckpt_path=path, weights_only=True)
    return Training(module.seen, [parameter.detach().clone() for parameter in module.parameters()], Numbered.loaded)


def resumed(folder: str, kind: str, name: str, quick: tuple[int, ...]) -> list[Any]:
    """For each save: what differs between the training that went on from it and the one that never stopped."""
    row = ROWS[name]
    expected = fit(kind, row, 0)
    # All batches of rows alike are too many: every other one, by turns the odd and the even.
    saves = quick or tuple(range(1 + list(ROWS).index(name) // 2 % 2, len(expected.seen), 2))
    saved = fit(kind, row, 0, Saves(folder, saves))
    found: list[Any] = [(saved.seen == expected.seen, distance(saved.parameters, expected.parameters))]
    window = row.arguments.get("accumulate_grad_batches", 1)
    for batch in saves:
        actual = fit(kind, row, 99 + dist.get_rank(), path=f"{folder}/{batch}.ckpt")
        rest = expected.seen[len(expected.seen) - len(actual.seen) :]
        begun = len(expected.seen) - len(actual.seen)
        assert batch - window < begun <= batch, (batch, begun)
        found.append((actual.seen == rest, distance(actual.parameters, expected.parameters)))
    return found


QUICK = [
    "shuffled",
    "workers",
    "random own, generator",
    "unknown",
    "batch sampler",
    "cycle own",
    "accumulated own",
    "stream",
    "stream, short windows",
    "cycled beside a stream",
    "stateful, no length",
    "stateful, cycled beside a stream",
]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ROWS))
def test_a_training_goes_on_with_the_next_sample(pool: RankPool, tmp_path: Path, name: str) -> None:
    # Under DDP ranks with different numbers of batches wait for each other forever.
    kind = ("ZeRO1Strategy", "TunedDDPStrategy")[list(ROWS).index(name) % 2 if "uneven" not in name else 0]
    quick = (1, 4, 8) if name in QUICK else ()
    for found in pool.run(2, resumed, str(tmp_path), kind, name, quick):
        assert found == [(True, 0.0)] * len(found)


class SavesFirst(Saves):
    """Saves before the first batch is trained on."""

    saved = False

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self.saved:
            self.saved = True
            trainer.save_checkpoint(f"{self.folder}/first.ckpt")


def saved_twice(folder: str, name: str) -> tuple[bool, float]:
    row, kind = ROWS[name], "ZeRO1Strategy"
    expected = fit(kind, row, 0, Saves(folder, (3,)))
    fit(kind, row, 1, SavesFirst(folder, ()), path=f"{folder}/3.ckpt")
    actual = fit(kind, row, 2, path=f"{folder}/first.ckpt")
    return actual.seen == expected.seen[3:], distance(actual.parameters, expected.parameters)


@pytest.mark.parametrize(
    "name",
    slow_unless(
        lambda name: name == "stream with a length",
        ["stream with a length", "stream", "shuffled", "unknown", "stream in workers"],
    ),
)
def test_a_resumed_training_may_be_saved_before_its_first_batch(pool: RankPool, tmp_path: Path, name: str) -> None:
    assert pool.run(2, saved_twice, str(tmp_path), name) == [(True, 0.0)] * 2


class FailedError(Exception):
    """Ends a training, and is caught."""


class Fails(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            raise FailedError


def saved_after_an_exception(folder: str, kind: str, name: str) -> tuple[bool, float]:
    row, path = ROWS[name], f"{folder}/after.ckpt"
    expected = fit(kind, row, 0)
    torch.manual_seed(0)
    strategy = getattr(lightning_parstrat, kind)(bucket_cap_mb=0.001)
    trainer = make_trainer(strategy, callbacks=[Fails()], **{"max_epochs": 2, **row.arguments})
    with workers_allowed(), pytest.raises(FailedError):
        trainer.fit(Sees(row), None if row.from_module else row.make())
    trainer.save_checkpoint(path)
    actual = fit(kind, row, 1, path=path)
    return actual.seen == expected.seen[3:], distance(actual.parameters, expected.parameters)


@pytest.mark.parametrize("name", ["shuffled", "workers", "stream", "stateful, no length"])
def test_a_training_may_be_saved_after_an_exception(pool: RankPool, tmp_path: Path, name: str) -> None:
    kind = "TunedDDPStrategy" if name == "workers" else "ZeRO1Strategy"
    assert pool.run(2, saved_after_an_exception, str(tmp_path), kind, name) == [(True, 0.0)] * 2


def until(folder: str, kind: str, name: str, batch: int) -> list[Any]:
    """On which samples a training was trained up to a save."""
    return fit(kind, ROWS[name], 0, Saves(folder, (batch,))).seen[:batch]


def goes_on(folder: str, kind: str, name: str, batch: int, **arguments: Any) -> list[Any]:
    return fit(kind, ROWS[name], 7, path=f"{folder}/{batch}.ckpt", max_epochs=1, **arguments).seen


def ids(of_ranks: list[Any]) -> list[int]:
    return [one for steps in of_ranks for parts in steps for part in parts for one in part or []]


RANKS = [(2, 1), (1, 2), (2, 3), (3, 2)]
SHARED = ["shuffled", "by one", "workers", "user's distributed", "unknown, workers", "validated", "persistent"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    slow_unless(
        lambda name, ranks: (
            (name, ranks) in (("shuffled", (2, 3)), ("shuffled", (2, 1)), ("user's distributed", (1, 2)))
        ),
        [(name, ranks) for name in SHARED for ranks in RANKS],
    ),
)
@pytest.mark.parametrize("kind", ["ZeRO1Strategy", pytest.param("TunedDDPStrategy", marks=pytest.mark.slow)])
def test_among_other_ranks_every_sample_that_is_left_comes_once(
    pool: RankPool, tmp_path: Path, kind: str, name: str, ranks: tuple[int, int]
) -> None:
    before, after = ranks
    batch = 3
    trained = pool.run(before, until, str(tmp_path), kind, name, batch)
    rest = pool.run(after, goes_on, str(tmp_path), kind, name, batch)
    assert len({len(steps) for steps in rest}) == 1
    counts = Counter(ids(trained) + ids(rest))
    if name.startswith("unknown"):
        # Which ones, a single process knows.
        (whole,) = pool.run(1, whole_epoch, kind, name)
        missing, more = Counter(ids([whole])) - counts, counts - Counter(ids([whole]))
    else:
        missing, more = Counter(range(SAMPLES)) - counts, counts - Counter(range(SAMPLES))
    assert not missing
    assert more.total() <= after - 1


def whole_epoch(kind: str, name: str) -> list[Any]:
    return fit(kind, ROWS[name], 0, max_epochs=1).seen


def chain(folder: str, kind: str, path: int | None, saves: tuple[int, ...]) -> list[Any]:
    row = ROWS["shuffled"]
    saving = Saves(folder, saves)
    at = None if path is None else f"{folder}/{path}.ckpt"
    return fit(kind, row, 5, saving, path=at, max_epochs=1, limit_train_batches=1.0).seen


def test_ranks_may_change_again_and_again(pool: RankPool, tmp_path: Path) -> None:
    kind, folder = "ZeRO1Strategy", str(tmp_path)
    # 45 samples in batches of 4: 8 are trained on by two ranks, 12 by three, the rest by one.
    first = pool.run(2, chain, folder, kind, None, (1,))
    second = pool.run(3, chain, folder, kind, 1, (2,))
    third = pool.run(1, chain, folder, kind, 2, ())
    trained = ids([steps[:1] for steps in first]) + ids([steps[:1] for steps in second]) + ids(third)
    assert sorted(trained) == list(range(SAMPLES))


def epoch_of(kind: str, batch_size: int, workers: int) -> list[Any]:
    row = Row(lambda: loader(48, batch_size=batch_size, num_workers=workers))
    return fit(kind, row, dist.get_rank()).seen


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(pool: RankPool, workers: int) -> None:
    steps = {}
    for ranks in (1, 2, 4):
        of_ranks = pool.run(ranks, epoch_of, "ZeRO1Strategy", 8 // ranks, workers)
        steps[ranks] = [sorted(ids([[step] for step in together])) for together in zip(*of_ranks, strict=True)]
    assert steps[1] == steps[2] == steps[4]
    assert len(steps[1]) == 12 and steps[1][:6] != steps[1][6:]


def test_samples_that_were_trained_on_are_not_loaded_again(pool: RankPool, tmp_path: Path) -> None:
    for loaded in pool.run(2, loaded_after_resume, str(tmp_path)):
        assert loaded == [46, 23 + 23 - 16]


def loaded_after_resume(folder: str) -> list[int]:
    row = ROWS["shuffled"]
    whole = fit("ZeRO1Strategy", row, 0, Saves(folder, (4,)))
    return [whole.loaded, fit("ZeRO1Strategy", row, 0, path=f"{folder}/4.ckpt").loaded]


class OwnClass(DataLoader[Tensor]):
    def __iter__(self) -> Any:
        return map(torch.clone, super().__iter__())


def warnings_of(make: Any, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit("ZeRO1Strategy", Row(make, {"use_distributed_sampler": False}), 0, Saves(folder, (2, 3)))
    return [str(one.message) for one in caught if "cannot be told where it stands" in str(one.message)]


def own_class() -> Any:
    return OwnClass(Numbered(), batch_size=4)


class Plain:
    """Iterable, and nothing more."""

    def __iter__(self) -> Any:
        return iter(DataLoader(Numbered(16), batch_size=4))


@pytest.mark.parametrize("make", [own_class, Plain, loader])
def test_one_warning_at_the_save_names_the_loader_that_is_lost(pool: RankPool, tmp_path: Path, make: Any) -> None:
    (found,) = pool.run(1, warnings_of, make, str(tmp_path))
    assert len(found) == (make is not loader)
    assert all(("OwnClass" if make is own_class else "Plain") in one for one in found)


def loader_in_and_after_training() -> list[bool]:
    given = loader(generator=torch.Generator())
    before = dict(vars(given))
    seen: list[bool] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            copied = copy.deepcopy(trainer.train_dataloader)
            seen.append(trainer.train_dataloader is given and isinstance(given.batch_sampler, BatchSampler))
            seen.append(type(copied.batch_sampler) is BatchSampler and len(copied) == len(given))

    fit("TunedDDPStrategy", Row(lambda: given, {"use_distributed_sampler": False}), 0, Looks())
    return [*seen, {**vars(given), "_iterator": None} == before]


def test_the_users_loader_has_its_own_sampler_again(pool: RankPool) -> None:
    (found,) = pool.run(1, loader_in_and_after_training)
    assert found == [True] * len(found) and len(found) > 2


def validated_before_training(folder: str) -> list[bool]:
    row = Row(loader, {"max_epochs": 1})
    expected = fit("ZeRO1Strategy", row, 0, Saves(folder, (4,)))
    trainer = make_trainer(lightning_parstrat.ZeRO1Strategy(bucket_cap_mb=0.001), max_epochs=1)
    module = Sees(row)
    trainer.validate(module, loader(8, shuffle=False), ckpt_path=f"{folder}/4.ckpt", weights_only=True)
    trainer.fit(module, row.make())
    filters = list(warnings.filters)
    resumed = fit("ZeRO1Strategy", row, 0, path=f"{folder}/4.ckpt")
    return [
        [len(step[0]) for step in module.seen] == [len(step[0]) for step in expected.seen],
        sorted(ids([module.seen])) == sorted(ids([expected.seen])),
        resumed.seen == expected.seen[4:],
        list(warnings.filters) == filters,
    ]


def test_a_run_leaves_nothing_of_its_checkpoint_to_the_next(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(1, validated_before_training, str(tmp_path))
    assert found == [True, True, True, True]


def beside_a_stream() -> Any:
    return {"a": loader(), "b": DataLoader(Stream(100), batch_size=BATCH)}


def trained_beside_a_stream(folder: str, path: str | None) -> list[Any]:
    row = Row(beside_a_stream, {"max_epochs": 1, "limit_train_batches": 12})
    return [step[0] for step in fit("ZeRO1Strategy", row, 0, Saves(folder, (3,)), path=path).seen]


def test_ranks_may_change_where_a_loader_has_no_length(pool: RankPool, tmp_path: Path) -> None:
    (before,) = pool.run(1, trained_beside_a_stream, str(tmp_path), None)
    after = pool.run(2, trained_beside_a_stream, str(tmp_path), f"{tmp_path}/3.ckpt")
    # 45 - 12 samples are left, in five batches of each rank; then the loader begins again, as the stream goes on.
    first = [one for steps in after for step in steps[:5] for one in step]
    assert set(first) == set(range(SAMPLES)) - {one for step in before[:3] for one in step}
