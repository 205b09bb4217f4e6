"""Where a training is killed from inside: while it saves, replaces what was saved before, or loads."""

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_parstrat.distributed import durable_files
from lightning_parstrat.distributed.checkpoint import dcp
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.engine import state
from lightning_parstrat.strategies.checkpoint import resume
from lightning_parstrat.strategies.checkpoint.checkpoints import Checkpoints


class KillsAt:
    """Kills this process when it is called for the n-th time."""

    def __init__(self, time_of_passing: int) -> None:
        self._left = time_of_passing

    @property
    def is_now(self) -> bool:
        self._left -= 1
        return self._left == 0

    def __call__(self) -> None:
        if self.is_now:
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # Nothing more is done until the signal is here.
    signal.pause()


def _mid_file(kills: KillsAt) -> None:
    write = torch.save

    def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not kills.is_now:
            write(value, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        write(value, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        kill()

    torch.save = half


def _around_renames(around: Callable[..., None], kills: KillsAt) -> None:
    for module in (durable_files, dcp):
        around(module, "put_in_place", kills)


def _mid_removal(kills: KillsAt) -> None:
    """When half of the files of an old folder are gone, or just before an old file goes."""
    remove = durable_files.remove

    def half(path: Path) -> None:
        if path.exists() and kills.is_now:
            for entry in sorted(path.iterdir())[::2] if path.is_dir() else []:
                entry.unlink()
            kill()
        remove(path)

    durable_files.remove = half


def _between_ranks(kills: KillsAt) -> None:
    """When the others have sent or written their parts."""
    for module, name in ((state, "_receive_parts"), (dcp.FolderWriter, "write_data"), (resume, "gather_object")):
        _before(module, name, lambda: (time.sleep(0.3), kills()))


SAVING: dict[str, Callable[[KillsAt], None]] = {
    "mid-file": _mid_file,
    "before fsync": lambda kills: _before(os, "fsync", kills),
    "before rename": lambda kills: _around_renames(_before, kills),
    "after rename": lambda kills: _around_renames(_after, kills),
    # The old folder has another name, and the new one not yet its own.
    "between renames": lambda kills: _after(os, "rename", kills),
    "mid-removal": _mid_removal,
    "between ranks": _between_ranks,
}
"""Points of a save, by what has a process killed there."""

LOADING: dict[str, Callable[[KillsAt], None]] = {
    "opening": lambda kills: _before(Checkpoints, "_open", kills),
    "opened": lambda kills: _after(Checkpoints, "_open", kills),
    "reading": lambda kills: _before(ShardedCheckpoint, "filled", kills),
    "loading optimizers": lambda kills: _before(Checkpoints, "load_optimizers", kills),
    "loaded optimizers": lambda kills: _after(Checkpoints, "load_optimizers", kills),
    "placing loaders": lambda kills: _before(resume.Resume, "_begin_training", kills),
}
"""Points of a resume, likewise."""

POINTS = {**SAVING, **LOADING}

OF_FOLDERS = ("between renames", "reading")
"""Points that a checkpoint in a single file does not pass."""

OF_RANK_0 = ("before rename", "after rename", "between renames", "mid-removal")
"""Points that only rank 0 passes."""


def _before(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act()
        return result

    setattr(owner, name, wrapped)
