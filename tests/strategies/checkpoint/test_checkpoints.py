"""What is loaded from a checkpoint, what hooks and plugins are given, and what is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.torch_plugin import TorchCheckpointIO

import lightning_parstrat
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY, DurableCheckpointIO
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import load, make
from tests.strategies.parity import make_trainer, train, zero1


def save_after_fit(path: str) -> None:
    run = train(lambda: zoo.MLP(), zero1())
    run.trainer.save_checkpoint(path)


def resume_without_states(path: str, strategy: str) -> tuple[list[str], int]:
    """Warnings, and the step from which training went on."""
    trainer = make_trainer(make(strategy), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(zoo.MLP(), zoo.loader(8, 4), ckpt_path=path)
    return [str(warning.message) for warning in caught], trainer.global_step


@pytest.mark.parametrize("strategy", ["zero1", "tuned"])
def test_weights_without_the_state_of_optimizers_are_loaded(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(1, save_after_fit, str(path))
    torch.save({**load(path), "optimizer_states": []}, path)
    ((messages, step),) = pool.run(1, resume_without_states, str(path), strategy)
    assert any("optimizers begin without state" in message for message in messages)
    assert step == load(path)["global_step"] + 2


@pytest.mark.parametrize("strategy", [lightning_parstrat.ZeRO1Strategy, lightning_parstrat.TunedDDPStrategy])
def test_wrappers_within_wrappers_are_given_an_innermost_one(tmp_path: Path, strategy: Any) -> None:
    for inner in (None, TorchCheckpointIO()):
        io = strategy(checkpoint_io=AsyncCheckpointIO(AsyncCheckpointIO(inner))).checkpoint_io
        innermost = io.checkpoint_io.checkpoint_io
        assert innermost is inner or (inner is None and isinstance(innermost, DurableCheckpointIO))
        io.save_checkpoint({"one": 1}, tmp_path / f"{inner}.ckpt")
        io.teardown()
        io.checkpoint_io.teardown()
        assert load(tmp_path / f"{inner}.ckpt") == {"one": 1}


class CountsLoads(zoo.MLP):
    loads = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loads += 1
        # What stock strategies would give, and nothing else.
        assert CHECKPOINT_KEY not in checkpoint and checkpoint["loops"]


def count_loads(path: str, form: str) -> list[int]:
    """How often a checkpoint is loaded: into a module as it was made, in a second training of it, in an evaluation."""
    train(zoo.MLP, make("zero3", form)).trainer.save_checkpoint(path)
    module, counted = CountsLoads(), []
    for _ in range(2):
        make_trainer(make("zero3", form), max_epochs=2).fit(module, zoo.loader(40, 4), ckpt_path=path)
        counted.append(module.loads)
    make_trainer(make("zero3", form)).validate(module, zoo.loader(8, 4), ckpt_path=path, verbose=False)
    return [*counted, module.loads]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_it_is_loaded_once(pool: RankPool, tmp_path: Path, form: str) -> None:
    assert pool.run(2, count_loads, str(tmp_path / "a.ckpt"), form) == [[1, 2, 3]] * 2
