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
from tests.slow import slow_unless
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


def train_unevenly(strategy: str, make: Callable[..., Any], lengths: Lengths, arguments: dict[str, Any]) -> Outcome:
    """Under "ddp" all ranks have the smallest number from the beginning."""
    own = smallest(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    arguments = dict(arguments)
    validation = sized(2) if arguments.pop("validate", False) else None
    return fit(strategy, make(*own), validation=validation, **arguments)


def assert_same_training(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.batches == theirs.batches
        assert ours.validations == theirs.validations
        assert ours.global_step == theirs.global_step
        torch.testing.assert_close(ours.parameters, theirs.parameters, **TOLERANCE)
        torch.testing.assert_close(ours.metrics, theirs.metrics, **TOLERANCE)


def check_unevenly(
    pool: RankPool, make: Callable[..., Any], lengths: Lengths, arguments: dict[str, Any]
) -> list[Outcome]:
    outcomes = {
        strategy: pool.run(len(lengths), train_unevenly, strategy, make, lengths, arguments, timeout=TIMEOUT)
        for strategy in ("zero1", "ddp")
    }
    assert_same_training(outcomes["zero1"], outcomes["ddp"])
    return outcomes["zero1"]


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    slow_unless(
        lambda arguments, world_size: world_size == 2 + ARGUMENTS.index(arguments) % 2,
        [(arguments, world_size) for arguments in ARGUMENTS for world_size in (2, 3)],
    ),
    ids=str,
)
def test_all_ranks_train_on_the_smallest_number_of_batches(
    pool: RankPool, world_size: int, arguments: dict[str, Any]
) -> None:
    # All pairs: each argument has loaders of both kinds, and so has each number of ranks.
    make = (sized, unsized)[(len(arguments) + world_size) % 2]
    outcomes = check_unevenly(pool, make, FIRST[world_size], arguments)
    assert set(outcomes[0].batches[:-1]) <= {0, 3, 2}


@pytest.mark.parametrize("arguments", [{"val_check_interval": 0.7, "validate": True}, {"limit_train_batches": 0.7}])
def test_a_part_of_an_epoch_is_a_part_of_the_smallest_number(pool: RankPool, arguments: dict[str, Any]) -> None:
    assert check_unevenly(pool, sized, FIRST[2], {"max_epochs": 2, **arguments})[0].batches[1] in (2, 3)


@pytest.mark.parametrize(
    "make", [integers, tensor, generator, ByIndex, Generates, Immutable, Slotted, Wrapper, Resumable]
)
def test_any_iterable_will_do(pool: RankPool, make: Callable[..., Any]) -> None:
    make = resumable if make is Resumable else make
    assert check_unevenly(pool, make, FIRST[3], EVERYTHING)[0].batches[1] == 3


def mixed(batches: int) -> Any:
    return unsized(batches) if dist.get_rank() else sized(batches)


@pytest.mark.slow
def test_workers(pool: RankPool) -> None:
    assert check_unevenly(pool, with_workers, FIRST[2], {"max_epochs": 2})[0].batches == [0, 3, 3]


def test_one_rank_alone_knows_its_length(pool: RankPool) -> None:
    # Under DDP that hangs.
    ours = pool.run(3, train_unevenly, "zero1", mixed, FIRST[3], EVERYTHING, timeout=TIMEOUT)
    theirs = pool.run(3, train_unevenly, "ddp", unsized, FIRST[3], EVERYTHING, timeout=TIMEOUT)
    assert_same_training(ours, theirs)


def resumable(batches: int) -> Resumable:
    return Resumable(Samples(batches), batch_size=BATCH_SIZE)


@pytest.mark.parametrize(
    ("make", "world_size"),
    [
        (min_size, 2),
        (max_size_cycle, 3),
        (max_size, 2),
        (min_size_unsized, 3),
        (max_size_cycle_unsized, 2),
        (sometimes_shorter, 3),
        (nested, 2),
        (nested, 3),
    ],
)
def test_each_of_several_loaders_ends_together(pool: RankPool, world_size: int, make: Callable[..., Any]) -> None:
    check_unevenly(pool, make, PAIRS[world_size], EVERYTHING)


@pytest.mark.parametrize("make", [sized, unsized])
def test_one_warning_on_rank_0_says_how_many_are_left_out(pool: RankPool, make: Callable[..., Any]) -> None:
    first, *others = check_unevenly(pool, make, FIRST[3], {})
    assert not any(outcome.warnings for outcome in others)
    (warning,) = first.warnings
    assert "3" in warning and ("6" in warning or make is unsized)


def observe_loader(trainer: Trainer) -> tuple[bool, str, str]:
    loader = trainer.train_dataloader
    return isinstance(loader, DataLoader), type(loader).__name__, type(loader).__module__


def the_loader_before_and_after(make: Callable[..., Any], lengths: Lengths) -> tuple[bool, list[Any]]:
    loader = make(*lengths[dist.get_rank()])
    seen = fit("zero1", loader, observe=lambda trainer: (trainer.train_dataloader is loader, *observe_loader(trainer)))
    return type(loader) is DataLoader and list(map(len, loader)) == [4] * lengths[dist.get_rank()][0], seen.observed


@pytest.mark.parametrize("make", [sized, unsized])
def test_the_users_loader_stays_what_it_was(pool: RankPool, make: Callable[..., Any]) -> None:
    expected = (True, [(True, True, "DataLoader", "torch.utils.data.dataloader")])
    assert pool.run(3, the_loader_before_and_after, make, FIRST[3], timeout=TIMEOUT) == [expected] * 3


def several_loaders_after_a_fit(lengths: Lengths) -> None:
    batches, numbers = lengths[dist.get_rank()]
    together = max_size(batches, numbers)
    first = fit("zero1", together, max_epochs=2)
    assert list(map(len, together.flattened)) == [batches, numbers]
    assert list(together.flattened[1]) == list(range(numbers))
    second = fit("zero1", together, max_epochs=2, val_check_interval=0.5)
    assert_same_training([first], [second])


def test_several_loaders_given_as_one_can_be_used_again(pool: RankPool) -> None:
    pool.run(2, several_loaders_after_a_fit, PAIRS[2], timeout=TIMEOUT)


class Failing(Takes):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("data is broken")
        return super().training_step(batch, batch_idx)


def the_loader_after_a_failure(make: Callable[..., Any], lengths: Lengths) -> bool:
    loaders = {"one": make(*lengths[dist.get_rank()]), "other": make(*lengths[dist.get_rank()])}
    with pytest.raises(KeyError):
        fit("zero1", loaders, Failing())
    return all(type(loader) is DataLoader for loader in loaders.values())


@pytest.mark.parametrize("make", [sized, unsized])
def test_a_failure_leaves_the_loader_as_it_was(pool: RankPool, make: Callable[..., Any]) -> None:
    assert all(pool.run(2, the_loader_after_a_failure, make, FIRST[2], timeout=TIMEOUT))


def copies(trainer: Trainer) -> list[Any]:
    loader = trainer.train_dataloader
    return [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]


def copy_in_training(lengths: Lengths) -> list[int]:
    loader = sized(*lengths[dist.get_rank()])
    outcome = fit("zero1", loader, observe=copies)
    assert all(type(copied) is DataLoader for copied in outcome.observed[0])
    return [*map(len, outcome.observed[0]), len(loader)]


def test_a_copy_is_not_limited(pool: RankPool) -> None:
    assert pool.run(2, copy_in_training, FIRST[2], timeout=TIMEOUT) == [[5] * 3, [3] * 3]


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


class Changing(Takes):
    """Another number of batches in each epoch, on each rank; now with a length, now without."""

    lengths = ((3, 5, 2), (4, 2, 3), (2, 2, 2), (1, 3, 2), (5, 4, 6))

    def __init__(self, even: bool) -> None:
        super().__init__()
        self.even = even
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


def train_with_changing_loaders(strategy: str) -> Outcome:
    torch.manual_seed(0)
    module = Changing(even=strategy == "ddp")
    outcome = fit(strategy, None, module, max_epochs=5, reload_dataloaders_every_n_epochs=1)
    assert len(module.made) == 5 and max(module.alive) == 1
    return outcome


@pytest.mark.parametrize("world_size", [2, 3])
def test_loaders_that_change_with_the_epoch_are_compared_again_and_let_go(pool: RankPool, world_size: int) -> None:
    ours, theirs = (
        pool.run(world_size, train_with_changing_loaders, strategy, timeout=TIMEOUT) for strategy in ("zero1", "ddp")
    )
    assert_same_training(ours, theirs)
    assert ours[0].batches[1:] == [min(lengths[:world_size]) for lengths in Changing.lengths]


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
        # After the third batch, before which buckets are planned anew.
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


class ValidatesAlone(Takes):
    """Its metrics stay on the rank, which may have none."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)


class NormalisedValidatesAlone(zoo.BatchNormalised):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)


def train_with_uneven_validation(
    strategy: str, make: Callable[..., Any], module: type[zoo.Zoo], lengths: tuple[int, ...]
) -> Outcome:
    torch.manual_seed(0)
    validated = module()
    validated.allow_zero_length_dataloader_with_multiple_devices = True
    batches = max(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    arguments = {"max_epochs": 3, "val_check_interval": 2}
    outcome = fit(strategy, sized(5), validated, make(batches), **arguments)
    return outcome._replace(validations=[])


@pytest.mark.parametrize(
    ("module", "make", "lengths"),
    [
        (ValidatesAlone, sized, (3, 0)),
        (ValidatesAlone, unsized, (0, 3)),
        (NormalisedValidatesAlone, sized, (3, 1)),
        (NormalisedValidatesAlone, sized, (3, 0)),
        (NormalisedValidatesAlone, sized, (0, 3)),
        (NormalisedValidatesAlone, unsized, (3, 0)),
        (NormalisedValidatesAlone, unsized, (0, 3)),
    ],
)
def test_validation_may_be_uneven(
    pool: RankPool, module: type[zoo.Zoo], make: Callable[..., Any], lengths: tuple[int, ...]
) -> None:
    ours, theirs = (
        pool.run(2, train_with_uneven_validation, strategy, make, module, lengths, timeout=TIMEOUT)
        for strategy in ("zero1", "ddp")
    )
    assert_same_training(ours, theirs)


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


class FetchesItself(Takes):
    """Draws from the loader within the step."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.compute_loss(batch)


def train_with_own_fetching(strategy: str, make: Callable[..., Any], lengths: Lengths) -> Outcome:
    own = smallest(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    torch.manual_seed(0)
    return fit(strategy, make(*own), FetchesItself(), sized(1), max_epochs=2)


@pytest.mark.parametrize("make", [sized, unsized])
def test_a_step_that_fetches_its_batches(pool: RankPool, make: Callable[..., Any]) -> None:
    ours, theirs = (
        pool.run(3, train_with_own_fetching, strategy, make, FIRST[3], timeout=TIMEOUT) for strategy in ("zero1", "ddp")
    )
    assert_same_training(ours, theirs)
    assert ours[0].batches == [0, 3, 3]


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


def train_with_a_data_module(
    strategy: str, make: Callable[..., Any], lengths: Lengths, module: type[Takes]
) -> tuple[Outcome, Any]:
    own = smallest(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    torch.manual_seed(0)
    model = module()
    return fit(strategy, Module(make, own), model, max_epochs=3, accumulate_grad_batches=2), getattr(
        model, "steps", None
    )


@pytest.mark.parametrize(("make", "module"), [(sized, KnowsItsSteps), (unsized, Takes), (max_size_cycle, Takes)])
def test_a_data_module_and_the_estimated_steps(pool: RankPool, make: Callable[..., Any], module: type[Takes]) -> None:
    lengths = PAIRS[2] if make is max_size_cycle else FIRST[2]
    ours, theirs = (
        pool.run(2, train_with_a_data_module, strategy, make, lengths, module, timeout=TIMEOUT)
        for strategy in ("zero1", "ddp")
    )
    assert_same_training([outcome for outcome, _ in ours], [outcome for outcome, _ in theirs])
    assert [steps for _, steps in ours] == [6 if module is KnowsItsSteps else None] * 2


def fit_twice(strategy: str, make: Callable[..., Any], lengths: Lengths) -> list[Outcome]:
    own = smallest(lengths) if strategy == "ddp" else lengths[dist.get_rank()]
    torch.manual_seed(0)
    loader, module = make(*own), Takes()
    return [fit(strategy, loader, module, max_epochs=2) for _ in range(2)]


@pytest.mark.parametrize("make", slow_unless(lambda make: make in (unsized, tensor), [sized, unsized, ByIndex, tensor]))
def test_the_same_loader_in_two_fits(pool: RankPool, make: Callable[..., Any]) -> None:
    ours, theirs = (pool.run(2, fit_twice, strategy, make, FIRST[2], timeout=TIMEOUT) for strategy in ("zero1", "ddp"))
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same_training(actual, expected)
