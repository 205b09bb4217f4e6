"""A checkpoint that is being written while training goes on."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.distributed.checkpoint.writing import CheckpointNotSavedError, RunningSave
from lightning_parstrat.distributed.durable_files import remove_atomically


class PendingSave:
    """At most one save in progress, and what is to be removed when it has succeeded.

    All ranks must call its methods at the same points.
    """

    def __init__(self) -> None:
        self._save: RunningSave | None = None
        self._obsolete: list[Path] = []

    def begin(self, save: RunningSave) -> None:
        """Notes a save that has begun; the one before must have been finished."""
        self._save = save

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun that nobody has waited for."""
        return self._save is not None

    def will_make(self, path: str) -> bool:
        """Whether the save in progress will create that path."""
        # ModelCheckpoint may ask by a relative path.
        return self._save is not None and os.path.abspath(path) == os.path.abspath(self._save.path)

    def remove_later(self, path: Path) -> None:
        """Removes a checkpoint when its successor is complete, and not at all if that fails."""
        self._obsolete.append(path)

    def finish(self, removes: bool) -> None:
        """Waits for the save in progress, and removes what it has made obsolete.

        Args:
            removes: Whether this rank is the one that removes.

        Raises:
            CheckpointNotSavedError: It has failed on any rank.
        """
        # Cleared first: a save that fails is over, too, and must not be waited for again.
        save, self._save = self._save, None
        obsolete, self._obsolete = self._obsolete, []
        if save is None:
            return
        try:
            save.wait()
        except CheckpointNotSavedError:
            kept = [str(path) for path in obsolete if path.exists()]
            if kept:
                rank_zero_warn(f"Kept because its successor was not saved: {', '.join(kept)}.")
            raise
        if removes:
            for path in obsolete:
                remove_atomically(path)

    def abandon(self) -> None:
        """Waits for the save in progress, reports its failure as a warning, and removes nothing."""
        save, self._save = self._save, None
        self._obsolete = []
        if save is not None:
            try:
                save.wait()
            # Only a warning: this runs in teardown, where an error would hide the one that ended the training.
            except RuntimeError as error:
                rank_zero_warn(f"{save.path} was not saved: {error}")


class FileSystemToBe:
    """A file system as it will be when the save in progress has ended.

    ModelCheckpoint adds a version to a name that exists, and would miss a checkpoint that is still being written.

    Args:
        filesystem: The file system as it is.
        pending: The save in progress.
    """

    def __init__(self, filesystem: Any, pending: PendingSave) -> None:
        self.filesystem = filesystem
        self.pending = pending

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is or will be such a path."""
        return self.pending.will_make(path) or bool(self.filesystem.exists(path, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name in ("filesystem", "pending"):
            # While it is being copied or unpickled it has neither: asking itself for them would never end.
            raise AttributeError(name)
        return getattr(self.filesystem, name)
