"""Ranks with different numbers of training batches train as if each had had the smallest of them."""

import copy
import gc
import multiprocessing
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.loaders import (
    ARGUMENTS,
    BATCH_SIZE,
    EVERYTHING,
    FIRST,
    PAIRS,
    TIMEOUT,
    TOLERANCE,
    ByIndex,
    Generates,
    Immutable,
    Lengths,
    Resumable,
    Samples,
    Slotted,
    Stream,
    Wrapper,
    batch_at,
    generator,
    integers,
    max_size,
    max_size_cycle,
    max_size_cycle_unsized,
    min_size,
    min_size_unsized,
    nested,
    sized,
    smallest,
    sometimes_shorter,
    tensor,
    unsized,
    with_workers,
)
from tests.strategies.parity import ddp, make_trainer, zero1


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
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Watch(Callback):
    """Counts batches and validations by epoch, and looks at the loader while it is in use."""

    def __init__(self, observe: Callable[[Trainer], Any] = lambda trainer: None) -> None:
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
    """What a training left behind; ``observed`` and ``warnings`` are this rank's own."""

    parameters: list[Tensor]
    batches: list[int]
    validations: list[tuple[int, int]]
    global_step: int
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
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> Outcome:
    torch.manual_seed(0)
    module = module or Takes()
    watch = Watch(observe)
    ours = ddp() if strategy == "ddp" else zero1()
    defaults: dict[str, Any] = {"use_distributed_sampler": False}
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = make_trainer(ours, callbacks=[watch, *callbacks], **{**defaults, **arguments})
    given = {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    with warnings.catch_warnings(record=True) as caught, workers_allowed():
        warnings.simplefilter("always")
        trainer.fit(module, **given, val_dataloaders=validation, ckpt_path=ckpt_path)
    texts = [str(warning.message) for warning in caught]
    return Outcome(
        [parameter.detach().clone() for parameter in module.parameters()],
        watch.batches,
        watch.validations,
        trainer.global_step,
        {name: value.detach().clone() for name, value in trainer.callback_metrics.items()},
        watch.observed,
        [text for text in texts if text.startswith(("The ranks have", "After "))],
    )


def assert_same_training(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.batches == theirs.batches
        assert ours.validations == theirs.validations
        assert ours.global_step == theirs.global_step
        torch.testing.assert_close(ours.parameters, theirs.parameters, **TOLERANCE)
        torch.testing.assert_close(ours.metrics, theirs.metrics, **TOLERANCE)


def resumable(batches: int) -> Resumable:
    return Resumable(Samples(batches), batch_size=BATCH_SIZE)


class Changing(Takes):
    """Another number of batches in each epoch, on each rank; now with a length, now without."""

    lengths = ((3, 5, 2), (4, 2, 3), (2, 2, 2), (1, 3, 2), (5, 4, 6))
    even = False

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[DataLoader]] = []
        self.alive: list[int] = []

    def train_dataloader(self) -> DataLoader:
        epoch = self.current_epoch
        lengths = self.lengths[epoch][: dist.get_world_size()]
        batches = min(lengths) if self.even else lengths[dist.get_rank()]
        loader = unsized(batches) if epoch % 2 else sized(batches)
        self.made.append(weakref.ref(loader))
        return loader

    def on_train_epoch_end(self) -> None:
        gc.collect()
        self.alive.append(sum(loader() is not None for loader in self.made))


class ValidatesAlone(Takes):
    """Its metrics stay on the rank, which may have none."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)


class NormalisedValidatesAlone(zoo.BatchNormalised):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)


class FetchesItself(Takes):
    """Draws from the loader within the step."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.compute_loss(batch)


class KnowsItsSteps(Takes):
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        self.steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Module(LightningDataModule):
    """The loaders in a data module."""

    def __init__(self, make: Callable[..., Any], batches: Sequence[int]) -> None:
        super().__init__()
        self.make, self.batches = make, batches

    def train_dataloader(self) -> Any:
        return self.make(*self.batches)

    def val_dataloader(self) -> Any:
        return sized(2)


def nothing(*_: int) -> None:
    """The module makes its own."""


BY_TWO = {"accumulate_grad_batches": 2}
FIVE: Lengths = ((5,), (5,))


class Case(NamedTuple):
    """A training on loaders of different lengths, which is ``ddp``'s on as many batches as the shortest has.

    Attributes:
        make: Makes the loader.
        lengths: Of each rank.
        arguments: The Trainer's; "validate" adds two batches.
        module: What is trained.
        as_module: Whether a data module has the loader.
        fits: How often.
        validation: How many batches each rank has to validate; ``ddp`` validates the most on all.
    """

    make: Callable[..., Any]
    lengths: Lengths
    arguments: Any = None
    module: Callable[[], Any] = Takes
    as_module: bool = False
    fits: int = 1
    validation: tuple[Callable[..., Any], tuple[int, int]] | None = None


OFTEN = {"max_epochs": 3, "val_check_interval": 2}
CASES: dict[str, Case] = {
    # All pairs: each argument has loaders of both kinds, and so has each number of ranks.
    **{
        f"{arguments}, {kind.__name__}": Case(kind, FIRST[2 + (number + ordinal) % 2], arguments)
        for number, arguments in enumerate(ARGUMENTS)
        for ordinal, kind in enumerate((sized, unsized))
    },
    "a part of the epoch is validated": Case(
        sized, FIRST[2], {"max_epochs": 2, "val_check_interval": 0.7, "validate": True}
    ),
    "a part of the epoch": Case(sized, FIRST[2], {"max_epochs": 2, "limit_train_batches": 0.7}),
    **{
        f"{make.__name__}": Case(make, FIRST[3], EVERYTHING)
        for make in (integers, tensor, generator, ByIndex, Generates, Immutable, Slotted, Wrapper, resumable)
    },
    **{
        f"{make.__name__}, {ranks} ranks": Case(make, PAIRS[ranks], EVERYTHING)
        for make, ranks in (
            (min_size, 2),
            (max_size_cycle, 3),
            (max_size, 2),
            (min_size_unsized, 3),
            (max_size_cycle_unsized, 2),
            (sometimes_shorter, 3),
            (nested, 2),
            (nested, 3),
        )
    },
    **{
        f"made anew, {ranks} ranks": Case(
            nothing, FIRST[ranks], {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 1}, Changing
        )
        for ranks in (2, 3)
    },
    "fetched in the step": Case(sized, FIRST[3], {"max_epochs": 2, "validate": True}, FetchesItself),
    "fetched in the step, unsized": Case(unsized, FIRST[3], {"max_epochs": 2, "validate": True}, FetchesItself),
    "of a data module": Case(sized, FIRST[2], {"max_epochs": 3, **BY_TWO}, KnowsItsSteps, as_module=True),
    "of a data module, unsized": Case(unsized, FIRST[2], {"max_epochs": 3, **BY_TWO}, as_module=True),
    "of a data module, cycled": Case(max_size_cycle, PAIRS[2], {"max_epochs": 3, **BY_TWO}, as_module=True),
    **{
        f"in two fits, {make.__name__}": Case(make, FIRST[2], {"max_epochs": 2}, fits=2)
        for make in (sized, unsized, ByIndex, tensor)
    },
    "validated by one": Case(sized, FIVE, OFTEN, ValidatesAlone, validation=(sized, (3, 0))),
    "validated by one, unsized": Case(sized, FIVE, OFTEN, ValidatesAlone, validation=(unsized, (0, 3))),
    "validated by both": Case(sized, FIVE, OFTEN, NormalisedValidatesAlone, validation=(sized, (3, 1))),
    "buffers, validated by one": Case(sized, FIVE, OFTEN, NormalisedValidatesAlone, validation=(sized, (3, 0))),
    "buffers, validated by other": Case(sized, FIVE, OFTEN, NormalisedValidatesAlone, validation=(sized, (0, 3))),
    "buffers, unsized": Case(sized, FIVE, OFTEN, NormalisedValidatesAlone, validation=(unsized, (3, 0))),
    "buffers, unsized, other": Case(sized, FIVE, OFTEN, NormalisedValidatesAlone, validation=(unsized, (0, 3))),
}


def train_case(strategy: str, case: Case) -> list[Outcome]:
    """Under "ddp" all ranks have the smallest number from the beginning."""
    torch.manual_seed(0)
    is_oracle = strategy == "ddp"
    own = smallest(case.lengths) if is_oracle else case.lengths[dist.get_rank()]
    arguments = dict(case.arguments or {})
    validation = sized(2) if arguments.pop("validate", False) else None
    module = case.module()
    if isinstance(module, Changing):
        module.even = is_oracle
    if case.validation is not None:
        module.allow_zero_length_dataloader_with_multiple_devices = True
        make, lengths = case.validation
        validation = make(max(lengths) if is_oracle else lengths[dist.get_rank()])
    data = Module(case.make, own) if case.as_module else case.make(*own)
    outcomes = [fit(strategy, data, module, validation, **arguments) for _ in range(case.fits)]
    if isinstance(module, Changing):
        assert len(module.made) == 5 and max(module.alive) == 1
    if isinstance(module, KnowsItsSteps):
        assert module.steps == 6
    if case.validation is not None:
        # Of a rank without a batch there are none.
        return [outcome._replace(validations=[]) for outcome in outcomes]
    return outcomes


def train_cases(strategy: str, ranks: int) -> dict[str, list[Outcome]]:
    return {name: train_case(strategy, case) for name, case in CASES.items() if len(case.lengths) == ranks}


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_train_on_the_smallest_number_of_batches(pool: RankPool, ranks: int) -> None:
    ours, theirs = (pool.run(ranks, train_cases, strategy, ranks, timeout=200.0) for strategy in ("zero1", "ddp"))
    for rank, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        for name, outcomes in actual.items():
            try:
                assert_same_training(outcomes, expected[name])
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {rank}: {error}") from error
            # One on rank 0 says how many batches are left out, in the first epoch that has fewer.
            case = CASES[name]
            if case.make in (sized, unsized) and case.arguments == {}:
                said = outcomes[0].warnings
                assert len(said) == (rank == 0) and all("3" in one for one in said), name


def mixed(batches: int) -> Any:
    return unsized(batches) if dist.get_rank() else sized(batches)


@pytest.mark.slow
def test_workers(pool: RankPool) -> None:
    case = Case(with_workers, FIRST[2], {"max_epochs": 2})
    ours, theirs = (pool.run(2, train_case, strategy, case, timeout=TIMEOUT) for strategy in ("zero1", "ddp"))
    assert_same_training([one for (one,) in ours], [one for (one,) in theirs])
    assert ours[0][0].batches == [0, 3, 3]


def test_one_rank_alone_knows_its_length(pool: RankPool) -> None:
    # Under DDP that hangs.
    ours = pool.run(3, train_case, "zero1", Case(mixed, FIRST[3], EVERYTHING), timeout=TIMEOUT)
    theirs = pool.run(3, train_case, "ddp", Case(unsized, FIRST[3], EVERYTHING), timeout=TIMEOUT)
    assert_same_training([one for (one,) in ours], [one for (one,) in theirs])


class Failing(Takes):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("data is broken")
        return super().training_step(batch, batch_idx)


def use_loaders() -> dict[str, bool]:
    """What becomes of a user's loaders while they are trained on, and afterwards."""
    rank, found = dist.get_rank(), {}
    own = FIRST[2][rank]
    for make in (sized, unsized):
        loader, other = make(*own), make(*own)
        copied = make is sized

        def look(trainer: Trainer, loader: Any = loader, copied: bool = copied) -> list[bool]:
            given = trainer.train_dataloader
            copies = [copy.deepcopy(given), pickle.loads(pickle.dumps(given))] if copied else []
            same = [type(one) is DataLoader and len(one) == own[0] for one in copies]
            return [given is loader, isinstance(given, DataLoader), type(given).__name__ == "DataLoader", *same]

        found[f"{make.__name__}, in use"] = all(fit("zero1", loader, observe=look).observed[0])
        found[f"{make.__name__}, later"] = type(loader) is DataLoader and [*map(len, loader)] == [4] * own[0]
        with pytest.raises(KeyError):
            fit("zero1", {"one": loader, "other": other}, Failing())
        found[f"{make.__name__}, failed"] = type(loader) is type(other) is DataLoader
    batches, numbers = PAIRS[2][rank]
    together = max_size(batches, numbers)
    first = fit("zero1", together, max_epochs=2)
    found["several"] = [*map(len, together.flattened)] == [batches, numbers]
    found["several, other"] = list(together.flattened[1]) == list(range(numbers))
    assert_same_training([first], [fit("zero1", together, max_epochs=2, val_check_interval=0.5)])
    return found


def test_the_users_loaders_stay_what_they_were(pool: RankPool) -> None:
    for found in pool.run(2, use_loaders, timeout=TIMEOUT):
        assert len(found) == 8 and all(found.values()), found


def sparse_rank(strategy: str, make: Callable[..., Any], allow: bool) -> tuple[str, list[int], bool]:
    module = Takes()
    module.allow_zero_length_dataloader_with_multiple_devices = allow
    loader = make(4 if dist.get_rank() == 0 else 0)
    try:
        outcome = fit(strategy, loader, module, max_epochs=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", [], type(loader) is DataLoader
    return "no error", outcome.batches, type(loader) is DataLoader


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_any_batch_is_an_error_on_every_rank(pool: RankPool, world_size: int) -> None:
    for message, _, restored in pool.run(world_size, sparse_rank, "zero1", sized, False, timeout=TIMEOUT):
        assert restored
        for words in ("MisconfigurationException", "A rank has no training batch", "another one has 4", "drop_last"):
            assert words in message, message


@pytest.mark.parametrize(("make", "allow", "batches"), [(sized, True, [0]), (unsized, False, [0, 0, 0])])
def test_a_rank_without_any_batch_ends_the_fit(
    pool: RankPool, make: Callable[..., Any], allow: bool, batches: list[int]
) -> None:
    assert pool.run(2, sparse_rank, "zero1", make, allow, timeout=TIMEOUT) == [("no error", batches, True)] * 2


def count_reductions(make: Callable[..., Any], lengths: Lengths) -> tuple[int, list[Any]]:
    """How many an epoch took, and whether the loader was touched."""
    loader = make(*lengths[dist.get_rank()])
    groups = process_groups(default_pg_timeout)
    before = sum(map(small_reductions_of, groups))
    seen = fit(
        "zero1", loader, observe=lambda trainer: trainer.train_dataloader is loader and type(loader) is DataLoader
    )
    return sum(map(small_reductions_of, groups)) - before, seen.observed


def test_equal_lengths_cost_nothing_per_batch(pool: RankPool) -> None:
    def per_batch(make: Callable[..., Any]) -> float:
        few, many = (pool.run(2, count_reductions, make, ((n,), (n,)), timeout=TIMEOUT) for n in (4, 8))
        assert make is unsized or few[1][1] == [True]
        return (many[0][0] - few[0][0]) / 4

    # One message with all that the ranks tell each other; where the end is unknown, each batch asks for one more.
    assert per_batch(sized) == 1
    assert per_batch(unsized) == 2


def save_and_resume(strategy: str, sized_loader: bool, lengths: Lengths, path: str) -> Outcome:
    own = smallest(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    data = (Samples if sized_loader else Stream)(*own)
    fit(strategy, Resumable(data, batch_size=BATCH_SIZE), callbacks=[SaveInEpoch(path)], max_epochs=2)
    return fit(strategy, Resumable(data, batch_size=BATCH_SIZE), max_epochs=3, ckpt_path=path)


class SaveInEpoch(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
            (loader,) = trainer.fit_loop._combined_loader.flattened
            assert trainer.fit_loop.state_dict()["state_dict"]["combined_loader"] == [loader.state_dict()]


def test_a_loader_with_a_state_resumes_as_under_ddp(pool: RankPool, tmp_path: Any) -> None:
    ours, theirs = (
        pool.run(2, save_and_resume, strategy, True, FIRST[2], str(tmp_path / strategy), timeout=TIMEOUT)
        for strategy in ("zero1", "ddp")
    )
    assert_same_training(ours, theirs)


def never_stopped(lengths: Lengths) -> Outcome:
    return fit("zero1", Resumable(Stream(*lengths[dist.get_rank()]), batch_size=BATCH_SIZE), max_epochs=3)


def test_one_without_a_length_resumes_where_ddp_loses_a_batch(pool: RankPool, tmp_path: Any) -> None:
    resumed = pool.run(2, save_and_resume, "zero1", False, FIRST[2], str(tmp_path / "zero1"), timeout=TIMEOUT)
    for actual, expected in zip(resumed, pool.run(2, never_stopped, FIRST[2], timeout=TIMEOUT), strict=True):
        assert sum(actual.batches) == sum(expected.batches) - 4 and actual.global_step == expected.global_step
        torch.testing.assert_close(actual.parameters, expected.parameters, **TOLERANCE)


def train_and_validate_on_the_same(make: Callable[..., Any], lengths: Lengths) -> tuple[list[int], int]:
    loader = make(*lengths[dist.get_rank()])
    watch = CountValidation()
    outcome = fit("zero1", loader, validation=loader, callbacks=[watch], max_epochs=2, val_check_interval=2)
    return outcome.batches, watch.batches


class CountValidation(Callback):
    batches = 0

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.batches += not trainer.sanity_checking


@pytest.mark.parametrize("make", [sized, unsized])
def test_one_loader_may_serve_training_and_validation(pool: RankPool, make: Callable[..., Any]) -> None:
    results = pool.run(2, train_and_validate_on_the_same, make, FIRST[2], timeout=TIMEOUT)
    assert [batches for batches, _ in results] == [[0, 3, 3]] * 2
    # Every rank validates on the same number, or on all that it has.
    assert {validated for _, validated in results} in ({6}, {6, 10})
