"""Files and folders are complete or absent, and what was there before stays until then."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.distributed import durable_files
from lightning_parstrat.distributed.durable_files import (
    PREFIX,
    put_in_place,
    recover,
    remove_atomically,
    remove_left_behind,
    temporary_name,
    written_durably,
)


def make(path: Path, kind: str, content: str) -> None:
    if kind == "file":
        path.write_text(content)
    elif kind == "folder":
        path.mkdir()
        (path / "__0_0.distcp").write_text(content)
    elif kind == "link":
        target = path.parent / f"target-of-{path.name}"
        make(target, "folder", "of the target")
        path.symlink_to(target)


def content(path: Path) -> str:
    return (path / "__0_0.distcp" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "link"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_the_new_one_takes_the_place_of_the_old(tmp_path: Path, before: str, new: str) -> None:
    path, temporary = tmp_path / "last.ckpt", tmp_path / "new"
    make(path, before, "old")
    make(temporary, new, "new")
    put_in_place(temporary, path)
    assert content(path) == "new" and not path.is_symlink()
    left = {"last.ckpt", "target-of-last.ckpt"} if before == "link" else {"last.ckpt"}
    assert {one.name for one in tmp_path.iterdir()} == left
    if before == "link":
        assert content(tmp_path / "target-of-last.ckpt") == "of the target"


def test_another_job_may_look_for_it_between_the_two_renames(tmp_path: Path) -> None:
    path, ended = tmp_path / "last.ckpt", threading.Event()
    make(path, "folder", "old")

    def look() -> None:
        while not ended.is_set():
            recover(path)

    with ThreadPoolExecutor(1) as another_job:
        looking = another_job.submit(look)
        try:
            for number in range(500):
                make(tmp_path / "new", "folder", f"{number}")
                put_in_place(tmp_path / "new", path)
                assert content(path) == f"{number}"
        finally:
            ended.set()
    looking.result()


@pytest.mark.parametrize("others", ["file", "folder"])
def test_two_jobs_may_save_under_one_name(tmp_path: Path, others: str) -> None:
    path = tmp_path / "last.ckpt"

    def save(kind: str, times: int = 1000) -> None:
        for _ in range(times):
            temporary = temporary_name(tmp_path)
            make(temporary, kind, kind)
            put_in_place(temporary, path)

    with ThreadPoolExecutor(2) as jobs:
        for job in [jobs.submit(save, kind) for kind in ("folder", others)]:
            job.result()
    save("folder", times=1)
    assert content(path) == "folder" and list(tmp_path.iterdir()) == [path]


def replaced_until(end: BaseException, path: Path, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces ``path`` until the second of the two renames ends by an error or, as if by a kill, otherwise."""
    temporary = temporary_name(path.parent)
    make(temporary, new, "new")

    def ends(*paths: Path) -> None:
        raise end

    with monkeypatch.context() as patch, pytest.raises(type(end)):
        patch.setattr(os, "replace", ends)
        put_in_place(temporary, path)


@pytest.mark.parametrize(("old", "new"), [("folder", "file"), ("folder", "folder"), ("file", "folder")])
def test_a_crash_between_two_renames_is_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    path = tmp_path / "last.ckpt"
    make(path, old, "old")
    replaced_until(KeyboardInterrupt(), path, new, monkeypatch)
    # Lightning searches for the last checkpoint by this pattern.
    assert not path.exists() and [content(one) for one in tmp_path.glob("last*.ckpt")] == ["old"]
    recover(path)
    assert content(path) == "old"
    replaced_until(KeyboardInterrupt(), path, new, monkeypatch)
    make(tmp_path / "new", new, "new")
    put_in_place(tmp_path / "new", path)
    assert content(path) == "new" and not list(tmp_path.glob("last-*"))


def test_if_the_second_rename_fails_the_old_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    make(path, "folder", "old")
    replaced_until(OSError(5, "Input/output error"), path, "folder", monkeypatch)
    assert content(path) == "old"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files_of_similar_names_stay(tmp_path: Path, kind: str) -> None:
    """Only one name is the project's, and it is long."""
    others = [tmp_path / f"best{more}.ckpt" for more in ("-v1", "-replaced", "-old", ".old")]
    for path in others:
        make(path, kind, path.name)
    recover(tmp_path / "best.ckpt")
    assert not (tmp_path / "best.ckpt").exists()
    make(tmp_path / "best.ckpt", "folder", "old")
    make(tmp_path / "new", "folder", "new")
    put_in_place(tmp_path / "new", tmp_path / "best.ckpt")
    assert content(tmp_path / "best.ckpt") == "new" and [content(path) for path in others] == [p.name for p in others]


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("before", ["nothing", "file", "folder"])
def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, kind: str
) -> None:
    make(tmp_path / "a.ckpt", before, "old")
    steps: list[str] = []

    def note(owner: Any, name: str, said: Callable[..., str]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (steps.append(said(*args)), original(*args))[1])

    note(os, "fsync", lambda descriptor: f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
    for name in ("replace", "rename"):
        note(os, name, lambda _, to: f"rename to {to.name}")
    note(durable_files, "remove", lambda path: "remove" if path.exists() else "look")
    with written_durably(tmp_path / "a.ckpt") as temporary:
        make(temporary, kind, "new")
    own = [step for step in steps if step != "look"]
    assert own[0] == f"sync {temporary.name}" and content(tmp_path / "a.ckpt") == "new"
    # What had the name before goes when the new name is on the disk.
    named = own.index("rename to a.ckpt")
    assert own[named + 1] == f"sync {tmp_path.name}" and "remove" not in own[:named]


def fails(temporary: Path) -> None:
    temporary.write_text("half")
    raise RuntimeError("halfway")


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "sub/a.ckpt"
    for before in ([], ["old"]):
        with pytest.raises(RuntimeError, match="halfway"), written_durably(path) as temporary:
            fails(temporary)
        assert [one.read_text() for one in path.parent.iterdir()] == before
        path.write_text("old")


def test_an_error_is_that_of_the_save_even_if_nothing_can_be_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(ValueError, match="mine"), written_durably(folder / "last.ckpt"):
        folder.rename(tmp_path / "moved")
        folder.write_text("another program's file")
        raise ValueError("mine")


def test_what_others_left_behind_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, recent, of_others = temporary_name(tmp_path), temporary_name(tmp_path), tmp_path / f"{PREFIX}notes.txt"
    for path, kind, minutes in ((old, "folder", 61), (recent, "file", 59), (of_others, "file", 61)):
        make(path, kind, "x")
        for one in (path, *path.glob("*")):
            os.utime(one, (time.time() - 60 * minutes,) * 2)
    remove_left_behind(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {recent.name, of_others.name}


def test_no_temporary_name_is_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """Lightning counts the files whose names contain hpc_ckpt_, and takes those that begin with last."""
    with written_durably(tmp_path / "hpc_ckpt_3.ckpt") as temporary:
        temporary.write_text("x")
        assert "ckpt" not in temporary.name and temporary.suffix != ".ckpt"


@pytest.mark.parametrize("kind", ["nothing", "file", "folder", "link"])
def test_removing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.ckpt"
    make(path, kind, "old")
    remove_atomically(path)
    assert {one.name for one in tmp_path.iterdir()} == ({"target-of-a.ckpt"} if kind == "link" else set())
