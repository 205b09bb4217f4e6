"""Incomplete checkpoints are refused before training, with their name and with what to do."""

import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.metadata import Metadata

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.durable_files import put_in_place
from lightning_parstrat.errors import CheckpointDamagedError
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import make, write
from tests.strategies.parity import Recorder, make_trainer


@pytest.fixture(scope="module")
def originals(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    for kind in ("full", "sharded"):
        pool.run(2, write, "convolutional", "zero1", kind, str(folder / f"{kind}.ckpt"))
    return {kind: folder / f"{kind}.ckpt" for kind in ("full", "sharded")}


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        checkpoint = torch.load(path, weights_only=False)
        change(checkpoint)
        torch.save(checkpoint, path)

    return damage


def cut(path: Path, name: str = "", part: float = 0.5) -> None:
    file = path / name if name else path
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), 64):
        content[position] ^= 0xFF
    file.write_bytes(content)


def other_groups(checkpoint: dict[str, Any]) -> None:
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    groups.append({**groups[0], "params": [groups[0]["params"].pop()]})


def other_weights(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    name = next(iter(state))
    state["renamed"] = state.pop(name)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "the end is missing": ("full", lambda p: cut(p, part=0.999), r"truncated, .*: its \d+ bytes .*resume from another"),
    "empty": ("full", lambda p: cut(p, part=0.0), r"full\.ckpt is truncated, or .*: its 0 bytes"),
    "a text": ("full", lambda p: p.write_text("hello, " * 99), r"full\.ckpt is .* not a checkpoint: its 693 bytes"),
    "weights alone": (
        "full",
        lambda p: torch.save(torch.load(p)["state_dict"], p),
        r"not a checkpoint of a Lightning Trainer: it lacks 'state_dict'.* load them in the module",
    ),
    "gone": ("full", lambda p: p.unlink(), r"Checkpoint file not found: .*full\.ckpt"),
    "a newer format": (
        "full",
        changed(lambda c: c[CHECKPOINT_KEY].update(format=99)),
        r"saved by a newer lightning-parstrat \(its format is 99.*pip install",
    ),
    "too many optimizers": (
        "full",
        changed(lambda c: c["optimizer_states"].append(c["optimizer_states"][0])),
        r"state of 2 optimizers, and the module has 1",
    ),
    "another shape": (
        "full",
        changed(lambda c: c["optimizer_states"][0]["state"][0].update(exp_avg=torch.zeros(7, 3))),
        r"'exp_avg' of shape \(7, 3\) for 'conv\.weight', which has shape \(6, 1, 3, 3\)",
    ),
    "other groups": ("full", changed(other_groups), "parameter groups of sizes"),
    "other weights": ("full", changed(other_weights), r"Missing key\(s\) .*conv\.weight.*Unexpected .*renamed"),
    "a folder of others": (
        "full",
        lambda p: (p.unlink(), p.mkdir()),
        r"is a folder, and not one .*consolidate_checkpoint .*full\.ckpt",
    ),
    "a missing rank": (
        "sharded",
        lambda p: (p / "__1_0.distcp").unlink(),
        r"sharded\.ckpt is damaged or incomplete: .*No such file .*__1_0\.distcp.*Copy the entire folder again",
    ),
    "a truncated rank": (
        "sharded",
        lambda p: cut(p, "__0_0.distcp"),
        r"sharded\.ckpt is damaged or incomplete: .*Copy the entire folder again",
    ),
    "no index": (
        "sharded",
        lambda p: (p / ".metadata").unlink(),
        r"its index, \.metadata, cannot be read .*No such file",
    ),
    "another index": (
        "sharded",
        lambda p: (p / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={}))),
        r"incomplete: state_dict/.* cannot be read \(KeyError",
    ),
    "garbage in a rank": (
        "sharded",
        lambda p: garble(p / "__0_0.distcp"),
        r"sharded\.ckpt .*Copy the entire folder again",
    ),
    "a folder of FSDP": (
        "sharded",
        lambda p: (p / "meta.pt").write_text("x"),
        r"is a folder, and not one .*consolidate_checkpoint .*sharded\.ckpt",
    ),
}


def attempt(path: str, strategy: str) -> tuple[str, bool]:
    """The error, and whether anything was trained."""
    recorder = Recorder()
    trainer = make_trainer(make(strategy), callbacks=[recorder], max_epochs=2)
    try:
        trainer.fit(zoo.Convolutional(), zoo.loader(8, 2), ckpt_path=path, weights_only=False)
    except Exception as error:
        return str(error), bool(recorder.losses)
    return "no error", bool(recorder.losses)


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_refused(pool: RankPool, tmp_path: Path, originals: dict[str, Path], damage: str) -> None:
    kind, inflict, message = DAMAGES[damage]
    path = tmp_path / f"{kind}.ckpt"
    shutil.copytree(originals[kind], path) if kind == "sharded" else shutil.copy(originals[kind], path)
    inflict(path)
    strategy = "tuned" if len(damage) % 2 else "zero1"
    for error, trained in pool.run(2, attempt, str(path), strategy):
        assert not trained
        assert re.search(message, error, re.DOTALL), error


def test_what_one_rank_cannot_read_is_refused_by_all(pool: RankPool, originals: dict[str, Path]) -> None:
    path = str(originals["full"])
    seeing, blind = pool.run(2, attempt_apart, [path, f"{path}.elsewhere"])
    assert "Rank 1 failed in loading" in seeing and "All nodes must see the same files" in seeing
    assert blind.startswith("Checkpoint file not found")


def attempt_last(folders: Sequence[str], flag: str) -> str:
    """The error of a rank that looks for the last checkpoint in a folder that other ranks do not have."""
    saving = ModelCheckpoint(folders[dist.get_rank()])
    trainer = make_trainer(flag, callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    try:
        trainer.fit(zoo.Convolutional(), zoo.loader(8, 2), ckpt_path="last", weights_only=False)
    except MisconfigurationException as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("flag", ["ddp_tuned", "zero1_custom", "zero3_custom"])
def test_ranks_that_find_no_last_checkpoint_are_named(
    pool: RankPool, tmp_path: Path, originals: dict[str, Path], flag: str
) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    shutil.copy(originals["full"], folders[0] / "last.ckpt")
    for error in pool.run(2, attempt_last, list(map(str, folders)), flag):
        assert re.search(r"resume from .*node0/last\.ckpt, and rank 1 found no checkpoint\. All nodes", error), error


def test_a_folder_that_is_replaced_while_it_is_read_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    folder, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    for target in (folder, other):
        shutil.copytree(originals["sharded"], target)
    checkpoint = ShardedCheckpoint(folder, weights_only=True)
    put_in_place(other, folder)
    with pytest.raises(CheckpointDamagedError, match=r"last\.ckpt was replaced .* probably another job"):
        checkpoint.filled(checkpoint.skeleton)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointDamagedError, match=r"last\.ckpt was replaced or removed"):
        checkpoint.filled(checkpoint.skeleton)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_ranks_that_read_different_checkpoints_are_told(pool: RankPool, tmp_path: Path, kind: str) -> None:
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(2)]
    for path in paths:
        pool.run(2, write, "convolutional", "zero1", kind, path)
    for message in pool.run(2, attempt_apart, paths):
        assert re.search(r"Ranks have read different checkpoints at .*\.ckpt: probably another job", message), message


def attempt_apart(paths: list[str]) -> str:
    return attempt(paths[dist.get_rank()], "zero1")[0]
