"""Ordinary Lightning checkpoints, written and read by any strategy at any world size."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.plugins.io.torch_plugin import TorchCheckpointIO
from torch import Tensor

import lightning_parstrat
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY, DurableCheckpointIO
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import adafactor
from tests.strategies.parity import by_flag, ddp, make_trainer, train, whole, zero1, zero3


def tuned_ddp() -> Any:
    return by_flag(lightning_parstrat.TunedDDPStrategy, find_unused_parameters=True)


def grouped(**arguments: Any) -> Any:
    """In groups of two ranks, each of which holds all of the state."""
    return zero1(shard_group=2, **arguments)


STRATEGIES = {
    "ddp": ddp,
    "zero1": zero1,
    "grouped": grouped,
    "tuned": tuned_ddp,
    "single": lambda: None,
    "zero3": zero3,
}
GLOBAL_BATCH = 12


MODULES = {
    "convolutional": lambda: zoo.Convolutional(),
    "scheduled": lambda: zoo.ScheduledTransformer(),
    "gan": lambda: zoo.Adversarial(),
    "tied": lambda: zoo.TiedLanguageModel(),
    "adafactor": lambda: zoo.Convolutional(adafactor),
}


def write(module: str, strategy: str, path: str) -> None:
    batch = GLOBAL_BATCH // dist.get_world_size()
    callback = ModelCheckpoint(dirpath=Path(path).parent, filename=Path(path).stem, save_top_k=-1)
    train(
        MODULES[module],
        STRATEGIES[strategy](),
        samples_per_rank=4 * batch,
        batch_size=batch,
        callbacks=[callback],
        enable_checkpointing=True,
    )


def resume(module: str, strategy: str, path: str) -> tuple[list[Tensor], int]:
    """Parameters after a further epoch on the same global batches, and the step reached."""
    batch = GLOBAL_BATCH // dist.get_world_size()
    torch.manual_seed(1)
    fresh = MODULES[module]()
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=2)
    data = zoo.loader(4 * GLOBAL_BATCH, batch, rank=dist.get_rank(), world_size=dist.get_world_size())
    trainer.fit(fresh, data, ckpt_path=path, weights_only=False)
    return [whole(parameter.detach()) for parameter in fresh.parameters()], trainer.global_step


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("module", MODULES)
def test_the_file_is_what_ddp_would_have_written(pool: RankPool, tmp_path: Path, module: str) -> None:
    for strategy in ("ddp", "zero1"):
        pool.run(2, write, module, strategy, str(tmp_path / f"{strategy}.ckpt"))
    expected, actual = load(tmp_path / "ddp.ckpt"), load(tmp_path / "zero1.ckpt")
    own = check_like(actual, expected)
    planned = [name for bucket in own["bucket_plan"] for name in bucket]
    # Neither buffers nor second names of tied parameters are in a bucket.
    assert len(set(planned)) == len(planned) and set(planned) <= actual["state_dict"].keys()
    # A view of a bucket would bring the whole bucket along, and each bucket once for each of its parameters.
    torch.save(actual, tmp_path / "without_own_key.ckpt")
    assert (tmp_path / "without_own_key.ckpt").stat().st_size < 1.1 * (tmp_path / "ddp.ckpt").stat().st_size


@pytest.mark.parametrize("module", ["scheduled", "gan", "tied", "adafactor"])
def test_the_file_of_sharded_parameters_is_what_ddp_would_have_written(
    pool: RankPool, tmp_path: Path, module: str
) -> None:
    for strategy in ("ddp", "zero3"):
        pool.run(2, write, module, strategy, str(tmp_path / f"{strategy}.ckpt"))
    expected, actual = load(tmp_path / "ddp.ckpt"), load(tmp_path / "zero3.ckpt")
    check_like(actual, expected)
    torch.save(actual, tmp_path / "without_own_key.ckpt")
    assert (tmp_path / "without_own_key.ckpt").stat().st_size < 1.1 * (tmp_path / "ddp.ckpt").stat().st_size


def check_like(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Takes this package's entries out of a checkpoint, which must then be the same as another."""
    own = actual.pop(CHECKPOINT_KEY)
    assert actual.keys() == expected.keys()
    assert actual["state_dict"].keys() == expected["state_dict"].keys()
    for key, value in expected["state_dict"].items():
        assert actual["state_dict"][key].stride() == value.stride()
        torch.testing.assert_close(actual["state_dict"][key], value)
    for ours, theirs in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        assert list(ours["state"]) == list(theirs["state"])
        for index, entries in theirs["state"].items():
            assert ours["state"][index].keys() == entries.keys()
            for key, value in entries.items():
                torch.testing.assert_close(ours["state"][index][key], value, msg=f"{index} {key}")
    return own


ROUTES = [
    (("zero1", 2), ("ddp", 2)),
    (("zero1", 2), ("zero1", 3)),
    (("zero1", 2), ("zero1", 1)),
    (("zero1", 3), ("single", 1)),
    (("ddp", 2), ("zero1", 3)),
    (("single", 1), ("zero1", 2)),
    (("grouped", 4), ("single", 1)),
    (("grouped", 4), ("zero1", 3)),
    (("zero1", 3), ("grouped", 4)),
    (("ddp", 2), ("grouped", 4)),
]


ROUTES_OF_SHARDED_PARAMETERS = [
    (("zero3", 2), ("ddp", 2)),
    (("zero3", 3), ("zero1", 2)),
    (("zero3", 2), ("zero3", 3)),
    (("zero3", 3), ("single", 1)),
    (("ddp", 2), ("zero3", 3)),
    (("zero1", 3), ("zero3", 2)),
    (("single", 1), ("zero3", 2)),
]


# By turns both modules take each route.
@pytest.mark.parametrize(
    ("module", "source", "target"),
    [(("scheduled", "adafactor")[number % 2], *route) for number, route in enumerate(ROUTES)]
    + [("scheduled", *route) for route in ROUTES_OF_SHARDED_PARAMETERS]
    + [("adafactor", *route) for route in ROUTES_OF_SHARDED_PARAMETERS],
)
def test_training_goes_on_elsewhere_as_it_would_have_here(
    pool: RankPool, tmp_path: Path, module: str, source: tuple[str, int], target: tuple[str, int]
) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(source[1], write, module, source[0], str(path))
    # What counts is that the state arrived: the reference goes on from the same file on a single device.
    expected, expected_step = pool.run(1, resume, module, "single", str(path))[0]
    for parameters, step in pool.run(target[1], resume, module, target[0], str(path)):
        assert step == expected_step
        for actual, reference in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


def save_after_fit(path: str) -> None:
    run = train(lambda: zoo.MLP(), zero1())
    run.trainer.save_checkpoint(path)


def test_a_checkpoint_saved_after_training_has_the_whole_state(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save_after_fit, str(tmp_path / "late.ckpt"))
    saved = load(tmp_path / "late.ckpt")
    names = list(saved["state_dict"])
    state = saved["optimizer_states"][0]["state"]
    assert [state[index]["exp_avg"].shape for index in range(len(names))] == [
        saved["state_dict"][name].shape for name in names
    ]
    assert all(state[index]["exp_avg"].any() for index in state)


def load_wrong_groups(path: str) -> str:
    trainer = make_trainer(zero1())
    try:
        trainer.fit(zoo.BareParameters(), zoo.loader(8, 2), ckpt_path=path, weights_only=False)
    except Exception as error:
        return repr(error)
    return "no error"


def test_state_of_another_optimizer_is_refused(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(1, write, "convolutional", "single", str(path))
    checkpoint = load(path)
    bare = zoo.BareParameters()
    checkpoint["state_dict"] = bare.state_dict()
    torch.save(checkpoint, path)
    for message in pool.run(2, load_wrong_groups, str(path)):
        assert "parameter groups of sizes" in message


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
    pool.run(2, write, "convolutional", "zero1", str(path))
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
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=2)
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
    run = train(lambda: zoo.MLP(), STRATEGIES[strategy]())
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


def wrapped_twice(inner: CheckpointIO | None) -> CheckpointIO:
    return AsyncCheckpointIO(AsyncCheckpointIO(inner))


@pytest.mark.parametrize("strategy", [lightning_parstrat.ZeRO1Strategy, lightning_parstrat.TunedDDPStrategy])
@pytest.mark.parametrize("inner", [None, TorchCheckpointIO()])
def test_wrappers_within_wrappers_are_given_an_innermost_one(
    tmp_path: Path, strategy: Any, inner: CheckpointIO | None
) -> None:
    io = strategy(checkpoint_io=wrapped_twice(inner)).checkpoint_io
    innermost = io.checkpoint_io.checkpoint_io
    assert innermost is inner or (inner is None and isinstance(innermost, DurableCheckpointIO))
    io.save_checkpoint({"one": 1}, tmp_path / "saved.ckpt")
    io.teardown()
    io.checkpoint_io.teardown()
    assert load(tmp_path / "saved.ckpt") == {"one": 1}
