"""``inspect`` and ``consolidate`` on what trainings have written, and on what is none of it."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_parstrat.cli.main import main
from tests.pool import RankPool
from tests.strategies.checkpoint.trainings import write


@pytest.fixture(scope="module")
def checkpoints(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in ("full", "sharded"):
        pool.run(2, write, "gan", "zero1", kind, str(folder / f"{kind}.ckpt"))
    return folder


def inspected(capsys: pytest.CaptureFixture[str], path: Path) -> list[str]:
    assert main(["inspect", str(path)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_full_one_and_a_sharded_one_hold_the_same(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, sharded = (inspected(capsys, checkpoints / f"{kind}.ckpt") for kind in ("full", "sharded"))
    assert "full.ckpt: full, " in full[0] and full[0].endswith("in 1 file")
    assert "sharded.ckpt: sharded, " in sharded[0] and sharded[0].endswith("in 4 files")
    assert full[1:] == sharded[1:] and full[2].startswith("by 2 ranks with different data, ")
    assert sum("exp_avg (" in line for line in full) == 2
    saved = torch.load(checkpoints / "full.ckpt", weights_only=True)
    for name, tensor in saved["state_dict"].items():
        line = next(line for line in full if line.startswith(f"{name} "))
        assert "x".join(map(str, tensor.shape)) in line


WRONG = [
    (["inspect", "missing.ckpt"], "There is no missing.ckpt"),
    (["inspect", "text.ckpt"], "text.ckpt is truncated, or not a checkpoint"),
    (["inspect", "foreign.ckpt"], "is not a checkpoint of a Lightning Trainer"),
    (["inspect", "objects.ckpt"], "--trusted"),
    (
        ["inspect", "short.ckpt"],
        "short.ckpt is damaged or incomplete: __1_0.distcp cannot be read (EOFError: it has less",
    ),
    (["inspect", "lacking.ckpt"], "lacking.ckpt is damaged or incomplete: __1_0.distcp cannot be read (FileNotFound"),
    (["consolidate", "full.ckpt", "out.ckpt"], "is a file, as a consolidated checkpoint is"),
    (["consolidate", "missing.ckpt", "out.ckpt"], "missing.ckpt does not exist"),
    (["consolidate", "folder", "out.ckpt"], "folder is not a sharded checkpoint"),
    (["consolidate", "sharded.ckpt", "folder"], "folder is a folder"),
    (["consolidate", "sharded.ckpt", "full.ckpt"], "full.ckpt already exists"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_usage(
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(checkpoints)
    Path("text.ckpt").write_text("hello " * 20)
    for damaged in ("short.ckpt", "lacking.ckpt"):
        shutil.copytree("sharded.ckpt", damaged, dirs_exist_ok=True)
    os.truncate("short.ckpt/__1_0.distcp", 100)
    os.remove("lacking.ckpt/__1_0.distcp")
    Path("folder").mkdir(exist_ok=True)
    torch.save({"w": torch.zeros(1)}, "foreign.ckpt")
    saved = torch.load("full.ckpt", weights_only=True)
    torch.save({**saved, "hyper_parameters": {"path": Path("x")}}, "objects.ckpt")
    before = Path("full.ckpt").read_bytes()
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert Path("full.ckpt").read_bytes() == before and not Path("out.ckpt").exists()


def test_objects_are_loaded_if_one_says_so(checkpoints: Path, tmp_path: Path) -> None:
    saved = torch.load(checkpoints / "full.ckpt", weights_only=True)
    torch.save({**saved, "hyper_parameters": {"path": Path("x")}}, tmp_path / "objects.ckpt")
    assert main(["inspect", "--trusted", str(tmp_path / "objects.ckpt")]) == 0


def test_classes_are_those_of_the_programs_folder(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings_of_program.py").write_text("class Settings:\n    pass\n")
    shutil.copytree(checkpoints / "sharded.ckpt", tmp_path / "objects.ckpt")
    monkeypatch.syspath_prepend(tmp_path)
    rest = tmp_path / "objects.ckpt" / "checkpoint.pt"
    saved = torch.load(rest, weights_only=False)
    saved["hyper_parameters"] = {"own": importlib.import_module("settings_of_program").Settings()}
    torch.save(saved, rest)
    monkeypatch.undo()
    for folder, code in ((checkpoints, 2), (tmp_path, 0)):
        sys.modules.pop("settings_of_program", None)
        monkeypatch.chdir(folder)
        with patch.object(sys, "path", list(sys.path)):
            words = [
                "consolidate",
                "--overwrite",
                "--trusted",
                str(tmp_path / "objects.ckpt"),
                str(tmp_path / "o.ckpt"),
            ]
            assert main(words) == code
        expected = "cannot be imported from here (No module named 'settings_of_program'). Run this in the program's"
        assert (expected in capsys.readouterr().err) == (code == 2)


def test_consolidating_replaces_on_demand(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.ckpt"
    out.write_text("old")
    assert main(["consolidate", "--overwrite", str(checkpoints / "sharded.ckpt"), str(out)]) == 0
    assert "bytes" in capsys.readouterr().out
    assert "out.ckpt: full" in inspected(capsys, out)[0]
