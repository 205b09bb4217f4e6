"""Ranks with different numbers of training batches train as if each had had the smallest of them."""

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import ddp, make_trainer, zero1

BATCH_SIZE = 4
TIMEOUT = 40.0
TOLERANCE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}

Lengths = tuple[tuple[int, ...], ...]
FIRST: dict[int, Lengths] = {2: ((5,), (3,)), 3: ((4,), (3,), (6,))}
PAIRS: dict[int, Lengths] = {2: ((5, 2), (3, 4)), 3: ((4, 3), (3, 2), (6, 5))}


def smallest(lengths: Lengths) -> tuple[int, ...]:
    return tuple(map(min, zip(*lengths, strict=True)))


def batch_at(number: int) -> Tensor:
    """Different on every rank."""
    start = (number * dist.get_world_size() + dist.get_rank()) * BATCH_SIZE
    return zoo.Samples(480).data[start : start + BATCH_SIZE]


class Samples(Dataset):
    """This rank's own."""

    def __init__(self, batches: int) -> None:
        self.batches = [batch_at(number) for number in range(batches)]

    def __len__(self) -> int:
        return len(self.batches) * BATCH_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index // BATCH_SIZE][index % BATCH_SIZE]


def sized(batches: int) -> DataLoader:
    return DataLoader(Samples(batches), batch_size=BATCH_SIZE)


def unsized(batches: int) -> DataLoader:
    return DataLoader(zoo.Stream(row for batch in Samples(batches).batches for row in batch), batch_size=BATCH_SIZE)


def together(mode: str, first: Callable[[int], Any], second: Callable[[int], Any]) -> Callable[..., CombinedLoader]:
    return lambda one, other: CombinedLoader({"one": first(one), "other": second(other)}, mode)


def indices(batches: int) -> list[int]:
    return list(range(batches))


def nothing(*_: int) -> None:
    """The module makes its own."""


class Takes(zoo.MLP):
    """Any batch: a tensor, a number of one, or several of them; and has a scheduler that steps by itself."""

    def compute_loss(self, batch: Any) -> Tensor:
        return super().compute_loss(torch.cat(list(self.tensors(batch))))

    def tensors(self, batch: Any) -> Iterator[Tensor]:
        if isinstance(batch, Tensor):
            assert type(batch) is Tensor
            yield batch
        elif isinstance(batch, int):
            yield batch_at(batch)
        elif batch is not None:
            for part in batch.values() if isinstance(batch, dict) else batch:
                yield from self.tensors(part)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        self.steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Changing(Takes):
    """Another number of batches in each epoch, on each rank; now with a length, now without."""

    lengths = ((3, 5, 2), (4, 2, 3), (2, 2, 2), (1, 3, 2), (5, 4, 6))
    even = False

    def train_dataloader(self) -> DataLoader:
        lengths = self.lengths[self.current_epoch][: dist.get_world_size()]
        batches = min(lengths) if self.even else lengths[dist.get_rank()]
        return unsized(batches) if self.current_epoch % 2 else sized(batches)


CYCLED_UNSIZED = together("max_size_cycle", unsized, unsized)


class Kept(Takes):
    kept: CombinedLoader | None = None
    even = False

    def train_dataloader(self) -> CombinedLoader:
        own = smallest(PAIRS[2]) if self.even else PAIRS[2][dist.get_rank()]
        self.kept = CYCLED_UNSIZED(*own) if self.kept is None else self.kept
        return self.kept


class ValidatesAlone(zoo.BatchNormalised):
    """Its metrics stay on the rank, which may have none; and it has buffers."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)


class FetchesItself(Takes):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.compute_loss(batch)


class Watch(Callback):
    """Counts batches and validations by epoch, and looks at the loader while it is in use."""

    def __init__(self, observe: Callable[[Trainer], Any]) -> None:
        self.batches: list[int] = [0]
        self.validations: list[tuple[int, int]] = []
        self.observe = observe
        self.observed: list[Any] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches.append(0)
        self.observed.append(self.observe(trainer))

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches[-1] += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations.append((trainer.current_epoch, trainer.global_step))


class Outcome(NamedTuple):
    """What a training left behind; from ``observed`` on this rank's own."""

    parameters: list[Tensor]
    batches: list[int]
    validations: list[tuple[int, int]]
    global_step: int
    planned: float
    metrics: dict[str, Tensor]
    observed: list[Any]
    warnings: list[str]


@contextmanager
def workers_allowed() -> Iterator[None]:
    """The pool's processes are daemons, which may not start any."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["daemon"] = False
    try:
        yield
    finally:
        settings["daemon"] = True


def fit(
    strategy: str,
    data: Any,
    module: LightningModule | None = None,
    validation: Any = None,
    observe: Callable[[Trainer], Any] = lambda trainer: None,
    **arguments: Any,
) -> Outcome:
    torch.manual_seed(0)
    module = module or Takes()
    watch = Watch(observe)
    ours = ddp() if strategy == "ddp" else zero1()
    trainer = make_trainer(ours, callbacks=[watch], **{"use_distributed_sampler": False, **arguments})
    with warnings.catch_warnings(record=True) as caught, workers_allowed():
        warnings.simplefilter("always")
        trainer.fit(module, data, validation)
    texts = [str(warning.message) for warning in caught]
    return Outcome(
        [parameter.detach().clone() for parameter in module.parameters()],
        watch.batches,
        watch.validations,
        trainer.global_step,
        getattr(module, "steps", 0),
        {name: value.detach().clone() for name, value in trainer.callback_metrics.items()},
        watch.observed,
        [text for text in texts if text.startswith(("The ranks have", "After "))],
    )


def assert_same_training(actual: Sequence[Outcome], expected: Sequence[Outcome], what: str = "") -> None:
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours[1:5] == theirs[1:5], (what, rank)
        for one, other in ((ours.parameters, theirs.parameters), (ours.metrics, theirs.metrics)):
            torch.testing.assert_close(one, other, **TOLERANCE, msg=lambda text, rank=rank: f"{what}, {rank}: {text}")


class Case(NamedTuple):
    """A training on loaders of different lengths, which is ``ddp``'s on as many batches as the shortest has.

    Attributes:
        make: Makes the loader.
        lengths: Of each rank.
        arguments: The Trainer's; "validate" adds two batches.
        module: What is trained.
        fits: How often.
        validation: How many batches each rank has to validate; ``ddp`` validates the most on all.
        oracle: Makes the loader of ``ddp``, if not as ``make`` does.
    """

    make: Callable[..., Any]
    lengths: Lengths
    arguments: Mapping[str, Any] = MappingProxyType({})
    module: Callable[[], Any] = Takes
    fits: int = 1
    validation: tuple[Callable[..., Any], tuple[int, int]] | None = None
    oracle: Callable[..., Any] | None = None


EVERYTHING = {"max_epochs": 3, "accumulate_grad_batches": 2, "validate": True}
OFTEN = {"max_epochs": 3, "val_check_interval": 2}
FIVE: Lengths = ((5,), (5,))
CYCLED = together("max_size_cycle", sized, sized)
MAX_SIZE = together("max_size", sized, indices)
CASES: dict[str, Case] = {
    "sized": Case(sized, FIRST[2]),
    "unsized": Case(unsized, FIRST[3]),
    "everything": Case(sized, FIRST[3], EVERYTHING),
    "everything, unsized": Case(unsized, FIRST[2], EVERYTHING),
    "limited": Case(sized, FIRST[2], {"max_epochs": 2, "limit_train_batches": 2}),
    "limited, unsized": Case(
        unsized, FIRST[3], {"limit_train_batches": 4, "accumulate_grad_batches": 2, "validate": True}
    ),
    "validated often": Case(sized, FIRST[3], {"max_epochs": 2, "val_check_interval": 2, "validate": True}),
    "validated across epochs": Case(
        unsized, FIRST[2], {**OFTEN, "val_check_interval": 4, "check_val_every_n_epoch": None, "validate": True}
    ),
    "by steps": Case(unsized, FIRST[3], {"max_steps": 4, "max_epochs": -1, "validate": True}),
    "reloaded": Case(sized, FIRST[2], {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}),
    "parts": Case(
        sized, FIRST[2], {"limit_train_batches": 0.7, "max_epochs": 2, "val_check_interval": 0.7, "validate": True}
    ),
    "tensor": Case(lambda batches: torch.stack(list(map(batch_at, range(batches)))), FIRST[3], EVERYTHING),
    "generator": Case(lambda batches: map(batch_at, range(batches)), FIRST[3], EVERYTHING),
    "min_size": Case(together("min_size", sized, sized), PAIRS[2], EVERYTHING),
    "min_size, unsized": Case(together("min_size", unsized, sized), PAIRS[3], EVERYTHING),
    "cycled": Case(CYCLED, PAIRS[3], EVERYTHING),
    "cycled, unsized": Case(CYCLED_UNSIZED, PAIRS[2], EVERYTHING),
    "max_size": Case(MAX_SIZE, PAIRS[2], EVERYTHING),
    "nested": Case(lambda one, two: {"one": [unsized(one), indices(two)], "other": sized(two)}, PAIRS[3], EVERYTHING),
    # Under DDP ranks of which only some know their lengths wait for each other forever.
    "one rank alone knows its length": Case(
        lambda batches: unsized(batches) if dist.get_rank() else sized(batches), FIRST[3], EVERYTHING, oracle=unsized
    ),
    "made anew": Case(nothing, FIRST[3], {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 1}, Changing),
    "given again": Case(nothing, PAIRS[2], {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}, Kept),
    "fetched in the step": Case(sized, FIRST[3], {"max_epochs": 2, "validate": True}, FetchesItself),
    "fetched in the step, unsized": Case(unsized, FIRST[2], {"max_epochs": 2, "validate": True}, FetchesItself),
    "in two fits, together": Case(MAX_SIZE, PAIRS[2], {"max_epochs": 2}, fits=2),
    "validated by one": Case(sized, FIVE, OFTEN, ValidatesAlone, validation=(sized, (0, 3))),
    "validated by one, unsized": Case(sized, FIVE, OFTEN, ValidatesAlone, validation=(unsized, (3, 0))),
}


def train_case(strategy: str, case: Case) -> list[Outcome]:
    """Under "ddp" all ranks have the smallest number from the beginning."""
    torch.manual_seed(0)
    is_oracle = strategy == "ddp"
    own = smallest(case.lengths) if is_oracle else case.lengths[dist.get_rank()]
    arguments = dict(case.arguments)
    validation = sized(2) if arguments.pop("validate", False) else None
    module = case.module()
    if isinstance(module, (Changing, Kept)):
        module.even = is_oracle
    if case.validation is not None:
        module.allow_zero_length_dataloader_with_multiple_devices = True
        of_validation, lengths = case.validation
        validation = of_validation(max(lengths) if is_oracle else lengths[dist.get_rank()])
    make = case.oracle if is_oracle and case.oracle is not None else case.make
    data = make(*own)
    outcomes = [fit(strategy, data, module, validation, **arguments) for _ in range(case.fits)]
    # Of a rank without a batch to validate there are none.
    return [one._replace(validations=[]) if case.validation else one for one in outcomes]


def train_cases(strategy: str, ranks: int) -> dict[str, list[Outcome]]:
    return {name: train_case(strategy, case) for name, case in CASES.items() if len(case.lengths) == ranks}


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_train_on_the_smallest_number_of_batches(pool: RankPool, ranks: int) -> None:
    ours, theirs = (pool.run(ranks, train_cases, strategy, ranks, timeout=200.0) for strategy in ("zero1", "ddp"))
    for name in ours[0]:
        for number in range(CASES[name].fits):
            assert_same_training([of[name][number] for of in ours], [of[name][number] for of in theirs], name)
    # One on rank 0 says how many batches are left out, in the first epoch that has fewer.
    for rank, outcomes in enumerate(ours):
        said = outcomes["sized" if ranks == 2 else "unsized"][0].warnings
        assert len(said) == (rank == 0) and all("3" in one for one in said)


class Failing(Takes):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("data is broken")
        return super().training_step(batch, batch_idx)


def use_loaders() -> list[bool]:
    """What becomes of a user's loaders while they are trained on, and afterwards."""
    own = FIRST[2][dist.get_rank()]
    loader, other = sized(*own), sized(*own)

    def look(trainer: Trainer) -> list[bool]:
        given = trainer.train_dataloader
        copies = (copy.deepcopy(given), pickle.loads(pickle.dumps(given)))
        same = [type(one) is DataLoader and len(one) == own[0] for one in copies]
        return [isinstance(given, DataLoader), given.dataset is loader.dataset, *same]

    found = [*fit("zero1", loader, observe=look).observed[0], [*map(len, loader)] == [4] * own[0]]
    found.append(fit("zero1", loader, validation=loader, max_epochs=2, val_check_interval=2).batches == [0, 3, 3])
    together = CombinedLoader({"one": loader, "other": other}, "max_size_cycle")
    with pytest.raises(KeyError):
        fit("zero1", together, Failing())
    with pytest.raises(ValueError, match="does not support the `CombinedLoader"):
        fit("zero1", CombinedLoader([loader, other], "sequential"))
    return [*found, together.flattened[0] is loader and together.flattened[1] is other]


def test_the_users_loaders_stay_what_they_were(pool: RankPool) -> None:
    assert pool.run(2, use_loaders, timeout=TIMEOUT) == [[True] * 7] * 2


def sparse_rank(make: Callable[..., Any], allow: bool) -> tuple[str, list[int]]:
    module = Takes()
    module.allow_zero_length_dataloader_with_multiple_devices = allow
    try:
        return "no error", fit("zero1", make(4 if dist.get_rank() == 0 else 0), module, max_epochs=2).batches
    except Exception as error:
        return f"{type(error).__name__}: {error}", []


def test_a_rank_without_any_batch_ends_the_fit_or_is_an_error_on_every_rank(pool: RankPool) -> None:
    assert pool.run(2, sparse_rank, sized, True, timeout=TIMEOUT) == [("no error", [0])] * 2
    assert pool.run(2, sparse_rank, unsized, False, timeout=TIMEOUT) == [("no error", [0, 0, 0])] * 2
    for message, _ in pool.run(3, sparse_rank, sized, False, timeout=TIMEOUT):
        for words in ("MisconfigurationException", "A rank has no training batch", "another one has 4", "drop_last"):
            assert words in message, message
