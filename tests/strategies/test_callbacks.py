"""Lightning's callbacks and the Trainer's own arguments: all that a training shows is what it shows under DDP.

A case is a line. Each is trained by the oracle and by the strategy, and everything is compared: parameters, losses,
learning rates and loss scale after every batch, parameters and buffers that validation sees, metrics, and what is left
in the module at the end. With ``--device`` one rank of that device takes the path of several.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_parstrat import TunedDDPStrategy
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.callback_scripts import (
    CopiesOnOneRank,
    Fails,
    Finetuned,
    KeepsOptimizer,
    OverflowsOnOneRank,
    SameOptimizer,
    Script,
    Setting,
    Tunable,
    Watch,
    WithoutOptimizer,
    check_ordinary_storage,
    fail_and_fit,
    fail_and_resume,
    fit,
    fit_and_step,
    fit_on_with_the_same_trainer,
    fit_twice,
    losses_until_stopped,
    parameters_of_copies,
    resume_from,
    saved_and_loaded,
    stopped_early,
    validate_then_fit,
)
from tests.strategies.cases import EQUAL, FP64
from tests.strategies.late import late
from tests.strategies.parity import (
    Run,
    by_flag,
    ddp,
    largest_difference,
    largest_loss_difference,
    make_trainer,
    reference,
    zero3,
)

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "ddp_tuned": lambda: TunedDDPStrategy(partial_window="lightning"),
    "whole batch": lambda: None,
    # With gradients exposed or not, as "auto" decides, and all parameters in one bucket.
    "zero1_custom": by_flag,
    # Parameters arrive as late as they may.
    "late": late,
    "zero2": partial(by_flag, shard_gradients=True),
    "zero3": zero3,
}


class Case(NamedTuple):
    """``callbacks`` gets a folder of its own; ``look`` says what more to compare.

    Each strategy is ``EQUAL``, or a part of the error that comes instead.
    """

    callbacks: Callable[[Path], list[Callback]] = lambda folder: []
    module: type[zoo.Zoo] = zoo.MLP
    trainer: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    script: Script = fit
    look: Callable[[Trainer], list[Any]] = lambda trainer: []
    oracle: str = "ddp"
    tolerance: float = FP64
    world_sizes: tuple[int, ...] = (2, 3)
    zero1_custom: str = EQUAL
    late: str = EQUAL
    zero2: str = EQUAL
    zero3: str = EQUAL
    ddp_tuned: str = EQUAL


SAVED = {"enable_checkpointing": True}
PLACES = ("training_step", "backward", "on_after_backward", "configure_gradient_clipping", "step", "after the step")
# They differ in what Lightning does, not in what the ranks do: by turns, and each at one world size.
ERRORS: tuple[tuple[type[BaseException], int], ...] = ((KeyError, 2), (KeyboardInterrupt, 3))
GOES_ON = "ddp_tuned"
"""Torch's DDP, whose data go on with the next sample in mid-epoch as those of ``zero1_custom`` do."""
CASES = {
    # Averages of weights.
    "weight averaging, resumed": Case(
        lambda folder: [WeightAveraging(), ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)],
        zoo.BatchNormalised,
        trainer=SAVED,
        script=resume_from("step=3.ckpt"),
        oracle=GOES_ON,
    ),
    "exponential averaging": Case(
        lambda _: [EMAWeightAveraging(decay=0.8, update_every_n_steps=2)],
        zoo.BatchNormalised,
        trainer={"accumulate_grad_batches": 2, "val_check_interval": 2},
    ),
    "stochastic weight averaging, batch norm": Case(
        lambda _: [StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)],
        zoo.BatchNormalised,
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    # The pass over the data that renews the statistics ends with a step, by gradients that validation may have freed.
    "stochastic weight averaging, batch norm, validated seldom": Case(
        lambda _: [StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)],
        zoo.BatchNormalised,
        trainer={"max_epochs": 3, "check_val_every_n_epoch": 2},
    ),
    # That step divides gradients by the loss scale once more.
    "stochastic weight averaging, batch norm, a loss scale": Case(
        lambda _: [StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)],
        zoo.BatchNormalised,
        trainer={"max_epochs": 3, "fp16": True, "check_val_every_n_epoch": 2},
        tolerance=1e-3,
    ),
    "stochastic weight averaging, an optimizer in the module": Case(
        lambda _: [StochasticWeightAveraging(0.02, swa_epoch_start=1)], KeepsOptimizer, script=fit_twice
    ),
    # What trains, for how long, how fast.
    # DDP itself never reduces what was frozen when it was created: the oracle is one process on the whole batch.
    "backbone finetuning": Case(
        lambda _: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)],
        Finetuned,
        trainer={"max_epochs": 3},
        oracle="whole batch",
    ),
    "backbone finetuning, resumed": Case(
        lambda folder: [
            BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01),
            ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1),
        ],
        Finetuned,
        trainer={**SAVED, "max_epochs": 3},
        script=resume_from("epoch=1.ckpt", by_the_same_callbacks=True),
        oracle="whole batch",
    ),
    "pruning": Case(
        lambda _: [ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)],
        trainer={"max_epochs": 3},
        zero3="ModelPruning compares all elements",
    ),
    "early stopping": Case(
        lambda _: [EarlyStopping("val_loss", min_delta=10.0, patience=1)], trainer={"max_epochs": 5}, look=stopped_early
    ),
    "learning rate finder that stops early": Case(
        lambda _: [LearningRateFinder(1e-3, 30.0, num_training_steps=25, early_stop_threshold=2.0)],
        Tunable,
        trainer={"max_epochs": 6},
        look=losses_until_stopped,
    ),
    # Checkpoints.
    "resumed within an epoch that accumulates": Case(
        lambda folder: [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        zoo.ScheduledTransformer,
        trainer={**SAVED, "accumulate_grad_batches": 2},
        script=resume_from("step=2.ckpt"),
        oracle=GOES_ON,
    ),
    "resumed from the best": Case(
        lambda folder: [ModelCheckpoint(folder, "best", monitor="val_loss", save_last=True)],
        trainer={**SAVED, "val_check_interval": 2},
        script=resume_from("best.ckpt"),
        oracle=GOES_ON,
    ),
    # The Trainer's arguments.
    "validated before, without inference mode": Case(script=validate_then_fit, trainer={"inference_mode": False}),
    "fit twice with one optimizer": Case(module=SameOptimizer, script=fit_twice),
    "a step after the training": Case(module=SameOptimizer, script=fit_and_step),
    "no optimizer": Case(module=WithoutOptimizer),
    "fit on with the same trainer": Case(module=zoo.ScheduledTransformer, script=fit_on_with_the_same_trainer),
    # Copies of the module made in training.
    "deep copies on one rank": Case(
        lambda _: [CopiesOnOneRank(copy.deepcopy)], KeepsOptimizer, look=parameters_of_copies
    ),
    "pickled on one rank": Case(
        lambda _: [CopiesOnOneRank(saved_and_loaded)],
        KeepsOptimizer,
        look=parameters_of_copies,
        # A class that was made by `fully_shard` has no name that pickle could find.
        zero3="Can't pickle",
    ),
    # The loss scale.
    "loss scale, one rank overflows": Case(
        module=OverflowsOnOneRank, trainer={"fp16": True, "max_epochs": 6}, tolerance=1e-3
    ),
    # Failures in a step, and what comes after.
    **{
        f"{error.__name__} in {where}": Case(
            module=Fails,
            script=fail_and_fit(where, error),
            world_sizes=(size,),
            # The optimizer holds the module, and cannot be tried on small parameters.
            zero3="strategy='zero1_custom'" if where == "step" else EQUAL,
        )
        for where, (error, size) in zip(PLACES, ERRORS * 3, strict=True)
    },
    **{
        f"{error.__name__} in {where}, resumed": Case(
            lambda folder: [OnExceptionCheckpoint(folder)],
            Fails,
            trainer=SAVED,
            script=fail_and_resume(where, error),
            oracle=GOES_ON,
            world_sizes=(size,),
        )
        for where, (error, size) in zip(("backward", "training_step"), ERRORS, strict=True)
    },
}
BY_ZERO2 = ("exponential averaging", "stochastic weight averaging, batch norm", "pruning")


def observe(case: Case, strategy: str, folder: Path) -> Run:
    """Runs the case's script on this rank; what is kept besides parameters is put among them."""
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if "fp16" in case.trainer else torch.float64
    split = (1, 0, 1) if case.oracle == strategy == "whole batch" else (world_size, rank, world_size)
    batch = 4 * world_size // split[0]

    def make_module() -> zoo.Zoo:
        # Converted at once: callbacks copy it before the Trainer does.
        return case.module().to(dtype)

    def data(per_rank: int) -> Any:
        return zoo.loader(per_rank * world_size, batch, dtype, *split[1:])

    watch = Watch()

    def trainer(**more: Any) -> Trainer:
        callbacks = [watch, *more.pop("callbacks", case.callbacks(folder))]
        arguments = {"max_epochs": 2, "default_root_dir": folder, **case.trainer}
        if dtype == torch.float64:
            arguments["precision"] = "64-true"
        return make_trainer(STRATEGIES[strategy](), callbacks=callbacks, **arguments, **more)

    setting = Setting(make_module(), make_module, trainer, (data(20), data(8)), folder)
    if case.module is Tunable:
        # A finder takes its data from the module.
        setting = setting._replace(data=(None, data(8)))
    module = case.script(setting)
    check_ordinary_storage(module)
    watch.keep(*module.state_dict().values())
    watch.keep(module.trainer.global_step, module.trainer.current_epoch, *case.look(module.trainer))
    # A comparison with what is not a number finds no difference.
    assert all(torch.isfinite(value).all() for values in watch.parameters for value in values)
    return Run(watch.parameters, watch.losses, module, module.trainer)


def compare(name: str, strategy: str, folder: str) -> tuple[float, float]:
    # By name, because a case's functions cannot be pickled.
    case = CASES[name]
    expected = reference(("callbacks", name), lambda: observe(case, case.oracle, Path(folder) / "oracle"))
    actual = observe(case, strategy, Path(folder) / "actual")
    return largest_difference(actual, expected), largest_loss_difference(actual, expected)


def plan(on_device: bool) -> Iterator[tuple[tuple[str, str, int], bool]]:
    """Every case by two of the strategies, on two ranks or three, in rotation, and by all that must end with an error.

    Yields also whether that is quick: a fifth of the cases by one.
    """
    for number, (name, case) in enumerate(CASES.items()):
        if on_device:
            # Interruptions are for three ranks alone. Torch cannot average integers on a GPU.
            if 2 in case.world_sizes and not name.startswith("weight averaging"):
                yield (name, "late", 1), name == "exponential averaging"
                if number % 9 == 6:
                    yield (name, "zero1_custom", 2), False
            continue
        if name in BY_ZERO2:
            yield (name, "zero2", 2), False
        for turn, strategy in enumerate(("late", "zero1_custom", "zero3", "ddp_tuned")):
            if strategy != case.oracle and (turn % 2 == number % 2 or getattr(case, strategy) != EQUAL):
                size = 3 if 3 in case.world_sizes and (strategy == "late" or 2 not in case.world_sizes) else 2
                yield (name, strategy, size), number % 5 == 0 and turn == number % 2 + number // 10 % 2 * 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function in (test_shows_what_the_oracle_shows, test_what_does_not_work_says_so):
        is_equal = metafunc.function is test_shows_what_the_oracle_shows
        trainings = dict(plan(metafunc.config.getoption("--device") is not None))
        metafunc.parametrize(
            ("name", "strategy", "world_size"),
            slow_unless(
                lambda *one: trainings[one],
                [one for one in trainings if (getattr(CASES[one[0]], one[1]) == EQUAL) == is_equal],
            ),
        )


def test_shows_what_the_oracle_shows(
    pool_of_device: RankPool, tmp_path: Path, name: str, strategy: str, world_size: int
) -> None:
    for everything, losses in pool_of_device.run(world_size, compare, name, strategy, str(tmp_path)):
        assert everything <= CASES[name].tolerance
        assert losses <= 10 * CASES[name].tolerance


def test_what_does_not_work_says_so(
    pool_of_device: RankPool, tmp_path: Path, name: str, strategy: str, world_size: int
) -> None:
    with pytest.raises(RankError, match=getattr(CASES[name], strategy)):
        pool_of_device.run(world_size, compare, name, strategy, str(tmp_path))
