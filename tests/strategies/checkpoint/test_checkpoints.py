"""What is loaded from a checkpoint, what hooks and plugins are given, and what is refused."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.torch_plugin import TorchCheckpointIO

import lightning_parstrat
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY, DurableCheckpointIO
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import load, make, write
from tests.strategies.parity import make_trainer, train, zero1


def save_after_fit(path: str) -> None:
    run = train(lambda: zoo.MLP(), zero1())
    run.trainer.save_checkpoint(path)


class Plan(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.names = trainer.strategy._engine.plan


def plans_after_resuming(path: str, caps: Sequence[float]) -> list[list[list[str]]]:
    plans = []
    for cap in caps:
        plan = Plan()
        trainer = make_trainer(zero1(bucket_cap_mb=cap), max_epochs=2, callbacks=[plan])
        trainer.fit(zoo.Convolutional(), zoo.loader(24, 6), ckpt_path=path, weights_only=False)
        plans.append(plan.names)
    return plans


def test_the_plan_of_a_checkpoint_is_kept_unless_it_was_made_for_something_else(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(2, write, "convolutional", "zero1", "full", str(path))
    checkpoint = load(path)
    own = checkpoint[CHECKPOINT_KEY]
    # One that no planner would come to.
    kept = [sorted(name for bucket in own["bucket_plan"] for name in bucket)]
    checkpoint[CHECKPOINT_KEY] = {**own, "bucket_plan": kept}
    torch.save(checkpoint, path)
    as_saved, with_other_cap = pool.run(2, plans_after_resuming, str(path), [0.001, 0.0005])[0]
    assert [sorted(bucket) for bucket in as_saved] == kept and len(with_other_cap) > 1
    (elsewhere,) = pool.run(1, plans_after_resuming, str(path), [0.001])[0]
    assert len(elsewhere) > 1


class KeysOfCheckpoints(Callback):
    def __init__(self) -> None:
        self.keys: list[set[str]] = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.keys.append(set(checkpoint))


def keys_seen_by_hooks(path: str) -> set[str]:
    module, look = zoo.MLP(), KeysOfCheckpoints()
    make_trainer(zero1(), max_epochs=1, callbacks=[look]).fit(module, zoo.loader(8, 4), ckpt_path=path)
    return look.keys[0]


def test_hooks_are_given_what_stock_strategies_would_give_them(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(2, save_after_fit, str(path))
    for keys in pool.run(2, keys_seen_by_hooks, str(path)):
        assert keys == load(path).keys() - {CHECKPOINT_KEY}


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
    assert any("the optimizers begin anew" in message for message in messages)
    assert step == load(path)["global_step"] + 2


def load_after_fit(strategy: str, path: str) -> int:
    """How many parameters have a state, loaded into the optimizers of a training that is over."""
    run = train(lambda: zoo.MLP(), make(strategy))
    run.module._trainer = None
    run.trainer.strategy.load_optimizer_state_dict(load(Path(path)))
    return len(run.trainer.strategy.optimizers[0].state_dict()["state"])


@pytest.mark.parametrize("strategy", ["zero1", "tuned"])
def test_state_is_loaded_where_the_module_has_no_trainer_any_more(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(2, save_after_fit, str(path))
    states = len(load(path)["optimizer_states"][0]["state"])
    assert states > 0 and pool.run(2, load_after_fit, strategy, str(path)) == [states, states]


class NamesArguments(TorchCheckpointIO):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, **named: Any) -> None:
        self.seen.append(named)
        super().save_checkpoint(checkpoint, path, **named)


@pytest.mark.parametrize("strategy", [lightning_parstrat.ZeRO1Strategy, lightning_parstrat.TunedDDPStrategy])
def test_a_plugin_gets_its_arguments_as_under_ddp(tmp_path: Path, strategy: Any) -> None:
    plugin = NamesArguments()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, plugins=[plugin], strategy=strategy())
    trainer.strategy.connect(zoo.MLP())
    trainer.strategy.save_checkpoint({"one": 1}, tmp_path / "saved.ckpt", storage_options=None)
    assert plugin.seen == [{"storage_options": None}] and load(tmp_path / "saved.ckpt") == {"one": 1}


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
