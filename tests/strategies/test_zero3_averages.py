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
from tests.strategies.checkpoint.test_checkpoints import load
from tests.strategies.parity import ddp, make_trainer, train, whole, zero1, zero3

BATCH = 12
KEPT = ("state_dict", "current_model_state", "averaging_state")


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


@pytest.mark.parametrize(
    ("module", "name", "ranks"),
    slow_unless(
        lambda *case: case in [("tied", "mean", 2), ("whole parameters", "exponential", 3), ("mlp", "stochastic", 2)],
        [(module, name, ranks) for module in MODULES for name in AVERAGES for ranks in (1, 2, 3)],
    ),
)
def test_averages_are_those_of_one_process(pool: RankPool, module: str, name: str, ranks: int) -> None:
    (expected,) = pool.run(1, average, module, name, "single")
    for actual in pool.run(ranks, average, module, name, "zero3"):
        assert_alike(actual, expected)


KNOW_NO_PLACE = {"single", "ddp"}
"""Of their loaders: their trainings go on at an epoch's end."""

ROUTES = [
    ("zero3", 2, "zero3", 3),
    ("zero3", 2, "ddp", 2),
    ("single", 1, "zero3", 2),
    ("zero3 sharded", 3, "zero3", 2),
    ("zero3 async", 2, "zero1", 3),
    ("zero1", 2, "zero3 sharded", 3),
]


@pytest.mark.parametrize(
    ("module", "name", "source", "source_ranks", "target", "target_ranks"),
    slow_unless(
        lambda module, name, *route: (module, name) == ("tied", "mean") and route[0] in ("zero3 sharded", "single"),
        [
            (module, name, *route)
            for module, name in (("tied", "mean"), ("whole parameters", "mean"), ("tied", "stochastic"))
            for route in ROUTES
            # Stock strategies do not go on with it at an epoch's end as if they had not stopped.
            if name != "stochastic" or not KNOW_NO_PLACE & {route[0], route[2]}
        ],
    ),
)
def test_averaging_goes_on_from_a_checkpoint(
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
    pool.run(source_ranks, average, module, name, source, str(tmp_path))
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
    for key in KEPT:
        assert_same({key: found[key]}, {key: expected[key]}, rtol=1e-4, atol=1e-5)
    # What is averaged is not what is trained.
    assert not torch.allclose(found["state_dict"]["mix.weight"], found["current_model_state"]["mix.weight"])


class OnOneRank(zoo.MLP):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["mine"] = next(self.parameters())


def save_what_one_rank_has(path: str) -> str:
    with pytest.raises(ValueError, match="on some ranks only") as raised:
        train(OnOneRank, zero3()).trainer.save_checkpoint(path)
    return str(raised.value)


def test_shards_that_one_rank_alone_saves_are_refused_on_all(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save_what_one_rank_has, str(tmp_path / "a.ckpt"))
    assert not list(tmp_path.iterdir())
