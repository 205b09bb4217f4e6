"""Saves that fail: all ranks raise, nothing is left, and training goes on; and what hooks may do to a checkpoint."""

import copy
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from lightning_parstrat.cli.main import main
from lightning_parstrat.core.tensor_trees import replace_leaves
from tests.comparing import assert_same, distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import load, make
from tests.strategies.parity import make_trainer, train


class Hooked(zoo.MLP):
    """A module whose hook does something to what is saved."""

    def __init__(self, hook: Callable[[Any, dict[str, Any]], None]) -> None:
        super().__init__()
        self.hook = hook

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hook(self, checkpoint)


def does_nothing(module: Any, checkpoint: dict[str, Any]) -> None: ...


def copies_states(module: Any, checkpoint: dict[str, Any]) -> None:
    if module.global_rank == 0:
        checkpoint["optimizer_states"] = copy.deepcopy(checkpoint["optimizer_states"])


def changes_placeholders(module: Any, checkpoint: dict[str, Any]) -> None:
    if module.global_rank == 0:
        checkpoint["optimizer_states"] = replace_leaves(checkpoint["optimizer_states"], torch.Tensor.half)


def writes_placeholders(module: Any, checkpoint: dict[str, Any]) -> None:
    if module.global_rank == 0:
        replace_leaves(checkpoint["optimizer_states"][0]["state"], torch.Tensor.zero_)


def copies_shards(module: Any, checkpoint: dict[str, Any]) -> None:
    """They would be written as if they were all there is."""
    checkpoint["state_dict"] = {name: value.clone() for name, value in checkpoint["state_dict"].items()}


def nothing(path: Path) -> None: ...


def a_folder_of_other_things(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


class Fails(NamedTuple):
    """What is there under the name, what a hook does, under which strategy, in which formats; and the errors."""

    there: Callable[[Path], Any]
    hook: Callable[[Any, dict[str, Any]], None]
    strategy: str
    forms: tuple[str, ...]
    error: str


UNCHANGED = r"File too large.*unchanged"
FAILS = {
    "a folder of other things": Fails(
        a_folder_of_other_things, does_nothing, "zero1", ("full", "sharded"), r"thesis\.txt"
    ),
    # Such as /dev/null, which would then be a file for the whole machine.
    "no file": Fails(os.mkfifo, does_nothing, "tuned", ("full", "sharded"), "neither a file nor a folder"),
    "placeholders are changed": Fails(nothing, changes_placeholders, "zero1", ("sharded",), "A hook has changed"),
    "placeholders are written": Fails(nothing, writes_placeholders, "zero3", ("sharded",), "A hook has changed"),
    "shards are copied": Fails(nothing, copies_shards, "zero3", ("sharded",), "A hook has changed"),
    "a function": Fails(
        nothing, lambda _, saved: saved.update(mine=lambda: None), "zero1", ("full", "sharded"), "pickle|local object"
    ),
    # More than a file may hold.
    "no room": Fails(
        lambda path: path.write_text("old"),
        lambda _, saved: saved.update(ballast=torch.zeros(10**6)),
        "zero1",
        ("full", "sharded", "async"),
        UNCHANGED,
    ),
}


class SavesInTraining(Callback):
    """Saves after the first step, with files that may hold only so much, and notes the error."""

    def __init__(self, path: str | None) -> None:
        self.path, self.error = path, "no error"

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.path is None or batch_idx != 1:
            return
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limits[1]))
        try:
            trainer.save_checkpoint(self.path)
            trainer.strategy.wait_for_saves()
        except Exception as error:
            self.error = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            module.hook = does_nothing


def fails_to_save(name: str, form: str, path: str) -> tuple[str, bool]:
    """The error of the save, and whether training has come to what it comes to without."""
    row, found = FAILS[name], []
    saves = [SavesInTraining(None), SavesInTraining(path)]
    for callback in saves:
        hook = does_nothing if callback.path is None else row.hook
        run = train(lambda hook=hook: Hooked(hook), make(row.strategy, form), callbacks=[callback], max_steps=3)  # type: ignore[misc]
        found.append(run.parameters)
    run.trainer.save_checkpoint(f"{path}-later")
    run.trainer.strategy.wait_for_saves()
    return saves[1].error, distance(*found) == 0


@pytest.mark.parametrize(
    ("name", "form"),
    slow_unless(
        lambda name, form: (name, form) not in [("no room", "sharded"), ("no file", "sharded")],
        [(name, form) for name, row in FAILS.items() for form in row.forms],
    ),
)
def test_a_save_that_fails_is_an_error_on_all_ranks_and_leaves_nothing(
    pool: RankPool, tmp_path: Path, name: str, form: str
) -> None:
    path = tmp_path / "a.ckpt"
    FAILS[name].there(path)
    before = [(one.name, one.stat().st_mode, one.stat().st_size) for one in sorted(tmp_path.rglob("*"))]
    for error, equal in pool.run(2, fails_to_save, name, form, str(path)):
        assert equal and re.search(FAILS[name].error, error, re.DOTALL), error
    later = tmp_path / "a.ckpt-later"
    assert load(later)["global_step"] == 3
    left = [one for one in sorted(tmp_path.rglob("*")) if later not in (one, one.parent)]
    assert [(one.name, one.stat().st_mode, one.stat().st_size) for one in left] == before


def keeps_whole(module: Any, checkpoint: dict[str, Any]) -> None:
    """A whole weight of its own, and a second name of one."""
    weight = checkpoint["state_dict"]["net.0.weight"]
    checkpoint["mine"] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    checkpoint["again"] = weight


def forgets_on_rank_0(module: Any, checkpoint: dict[str, Any]) -> None:
    if module.global_rank == 0:
        del checkpoint["optimizer_states"], checkpoint["loops"]


def keeps_a_set(module: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["kept"] = {torch.ones(3)}


HOOKS = {hook.__name__: hook for hook in (copies_states, keeps_whole, forgets_on_rank_0, keeps_a_set)}


def save_with(hook: str, strategy: str, form: str, path: str) -> None:
    trainer = make_trainer(make(strategy, form), max_steps=1)
    trainer.fit(Hooked(HOOKS[hook]), zoo.loader(8, 2))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    ("hook", "strategy", "form"),
    [
        ("copies_states", "zero1", "full"),
        ("copies_states", "zero1", "sharded"),
        ("keeps_whole", "zero3", "sharded"),
        ("forgets_on_rank_0", "zero1", "full"),
        ("forgets_on_rank_0", "zero1", "sharded"),
    ],
)
def test_hooks_that_change_a_checkpoint(pool: RankPool, tmp_path: Path, hook: str, strategy: str, form: str) -> None:
    pool.run(2, save_with, hook, strategy, form, str(tmp_path / "a.ckpt"))
    found = load(tmp_path / "a.ckpt")
    # Rank 0 says what a checkpoint holds.
    assert ("optimizer_states" in found) == (hook != "forgets_on_rank_0")
    if hook == "keeps_whole":
        assert_same([found["mine"], found["again"]], [found["state_dict"]["net.0.weight"]] * 2)


def test_tensors_within_other_objects_are_consolidated(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save_with, "keeps_a_set", "zero1", "sharded", str(tmp_path / "a.ckpt"))
    assert main(["consolidate", "--trusted", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0
    (kept,) = torch.load(tmp_path / "b.ckpt", weights_only=False)["kept"]
    assert torch.equal(kept, torch.ones(3))


class Rising(zoo.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rises", float(self.global_step))
        return super().training_step(batch, batch_idx)


def best_of_two(folder: str, form: str) -> list[bool]:
    """Two callbacks save under names that are the same but for the counter; whether the best of each is there."""
    often = {"every_n_train_steps": 1, "save_on_train_epoch_end": False, "save_top_k": 1}
    callbacks = [ModelCheckpoint(folder, monitor="rises", mode=mode, **often) for mode in ("min", "max")]
    trainer = make_trainer(make("zero1", form), callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Rising(), zoo.loader(24, 4))
    return [Path(callback.best_model_path).exists() for callback in callbacks]


@pytest.mark.parametrize("form", ["sharded", "async"])
def test_names_are_counted_up_for_what_is_still_being_written(pool: RankPool, tmp_path: Path, form: str) -> None:
    assert pool.run(2, best_of_two, str(tmp_path), form) == [[True, True]] * 2


class Breaks(zoo.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise KeyError("the program's own")
        return super().training_step(batch, batch_idx)


def kept_after_an_exception(folder: str, form: str) -> list[str]:
    latest = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, filename="{step}")
    trainer = make_trainer(make("zero1", form), callbacks=[latest], enable_checkpointing=True)
    with pytest.raises(KeyError, match="own"):
        trainer.fit(Breaks(), zoo.loader(24, 4))
    dist.barrier()
    return [one.name for one in Path(folder).iterdir()]


@pytest.mark.parametrize("form", ["sharded", "async"])
def test_what_a_complete_save_replaces_is_removed_after_an_exception_too(
    pool: RankPool, tmp_path: Path, form: str
) -> None:
    assert pool.run(2, kept_after_an_exception, str(tmp_path), form) == [["step=3.ckpt"]] * 2


def saved_at_home(home: str, path: str, form: str) -> bool:
    with patch.dict(os.environ, HOME=home):
        train(zoo.MLP, make("zero1", form), max_steps=1).trainer.save_checkpoint(path)
        again = make_trainer(make("zero1", form), max_steps=2, max_epochs=3)
        again.fit(zoo.MLP(), zoo.loader(8, 2), ckpt_path=path, weights_only=True)
    return again.global_step == 2


@pytest.mark.parametrize(("path", "form"), [("~/a.ckpt", "sharded"), ("file://{home}/a.ckpt", "full")])
def test_paths_as_lightning_writes_them(pool: RankPool, tmp_path: Path, form: str, path: str) -> None:
    assert all(pool.run(2, saved_at_home, str(tmp_path), path.format(home=tmp_path), form))
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]
