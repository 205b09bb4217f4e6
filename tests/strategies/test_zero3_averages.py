"""Averages of sharded weights: those of one process, in validation, at the end, in checkpoints, and after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_parstrat.cli.main import main
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import load
from tests.strategies.parity import ddp, make_trainer, train, whole, zero1, zero3

BATCH = 12


class Loosely(WeightAveraging):
    """A user's own: every other step, and at the ends of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None or (step_idx is not None and step_idx % 2 == 0)


AVERAGES: dict[str, Callable[[], Callback]] = {
    "mean": lambda: WeightAveraging(),
    "exponential": lambda: EMAWeightAveraging(decay=0.8),
    "exponential, without buffers": lambda: EMAWeightAveraging(decay=0.8, use_buffers=False, update_every_n_steps=2),
    "a user's own": lambda: Loosely(),
    "stochastic": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1),
}
MODULES = {
    "mlp": zoo.MLP,
    "tied": zoo.TiedLanguageModel,
    "whole parameters": zoo.Convolutional,
    "scalars": zoo.BareParameters,
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "ddp": ddp,
    "zero1": zero1,
    "zero3": zero3,
    "zero3 sharded": lambda: zero3(checkpoint_format="sharded"),
    "zero3 async": lambda: zero3(checkpoint_format="sharded", async_save=True),
}


class Validated(Callback):
    """The losses of validations, each the mean over ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def average(
    module: str, name: str, strategy: str, folder: str = "", resumed: str | None = None
) -> tuple[list[float], list[Tensor]]:
    """Validation losses and the weights at the end, which are averages; every second of 8 steps is saved."""
    torch.manual_seed(0)
    ranks, validated = dist.get_world_size(), Validated()
    callbacks = [AVERAGES[name](), validated]
    if folder:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1))
    trainer = make_trainer(
        STRATEGIES[strategy](),
        max_epochs=2,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        val_check_interval=2,
    )
    made = MODULES[module]()
    of_rank = {"rank": dist.get_rank(), "world_size": ranks}
    data = zoo.loader(4 * BATCH, BATCH // ranks, **of_rank)
    trainer.fit(made, data, zoo.loader(BATCH, BATCH // ranks, **of_rank), ckpt_path=resumed, weights_only=False)
    return validated.losses, [whole(parameter.detach()).clone() for parameter in made.parameters()]


def assert_alike(actual: Any, expected: Any) -> None:
    assert len(actual[0]) == len(expected[0]) > 0
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)


KNOW_NO_PLACE = {"single", "ddp"}
"""Of their loaders: their trainings go on at an epoch's end, "stochastic" not as if they had not stopped."""

# Every average, every module, every kind of checkpoint and every direction once or more.
ROUTES = [
    ("tied", "mean", "zero3 sharded", 3, "zero3", 2),
    ("mlp", "stochastic", "zero3", 2, "zero3", 3),
    ("whole parameters", "exponential", "single", 1, "zero3", 2),
    ("tied", "mean", "zero3", 2, "ddp", 2),
    ("whole parameters", "mean", "zero3 async", 2, "zero1", 3),
    ("tied", "stochastic", "zero1", 2, "zero3 sharded", 3),
    ("scalars", "exponential, without buffers", "zero3", 1, "zero3", 2),
    ("scalars", "a user's own", "zero3 sharded", 2, "zero3", 3),
    ("mlp", "a user's own", "zero3", 3, "zero3 sharded", 1),
    ("tied", "exponential", "ddp", 2, "zero3", 3),
]


@pytest.mark.parametrize(
    ("module", "name", "source", "source_ranks", "target", "target_ranks"),
    slow_unless(lambda *route: route in ROUTES[:3], ROUTES),
)
def test_averages_are_those_of_one_process_and_go_on_from_a_checkpoint(
    pool: RankPool,
    tmp_path: Path,
    module: str,
    name: str,
    source: str,
    source_ranks: int,
    target: str,
    target_ranks: int,
) -> None:
    (expected,) = pool.run(1, average, module, name, "single")
    for actual in pool.run(source_ranks, average, module, name, source, str(tmp_path)):
        assert_alike(actual, expected)
    within_epoch = not KNOW_NO_PLACE & {source, target}
    path = str(tmp_path / ("step=6.ckpt" if within_epoch else "step=4.ckpt"))
    for losses, weights in pool.run(target_ranks, average, module, name, target, "", path):
        assert_alike((losses, weights), (expected[0][-len(losses) :], expected[1]))


@pytest.mark.parametrize("kind", ["zero3", "zero3 sharded"])
def test_a_checkpoint_holds_what_that_of_one_process_does(pool: RankPool, tmp_path: Path, kind: str) -> None:
    for strategy, ranks in (("single", 1), (kind, 3)):
        pool.run(ranks, average, "tied", "exponential", strategy, str(tmp_path / strategy))
    path = tmp_path / kind / "step=4.ckpt"
    if path.is_dir():
        assert main(["consolidate", str(path), str(tmp_path / "made.ckpt")]) == 0
        path = tmp_path / "made.ckpt"
    found, expected = load(path), load(tmp_path / "single" / "step=4.ckpt")
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_same({key: found[key]}, {key: expected[key]}, rtol=1e-4, atol=1e-5)
    # What is averaged is not what is trained.
    assert not torch.allclose(found["state_dict"]["mix.weight"], found["current_model_state"]["mix.weight"])


def keeps_what_was_the_users() -> bool:
    module = zoo.MLP()
    asked: list[bool] = []
    module.configure_model = own = lambda: asked.append(True)  # type: ignore[method-assign]
    train(lambda: module, zero3(), callbacks=[EMAWeightAveraging(decay=0.5)])
    return bool(asked) and vars(module)["configure_model"] is own


def test_a_method_that_the_user_has_put_into_the_module_is_there_after_the_training(pool: RankPool) -> None:
    assert all(pool.run(2, keeps_what_was_the_users))
