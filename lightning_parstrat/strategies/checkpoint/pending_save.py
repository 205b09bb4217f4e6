"""A checkpoint that is being written while training goes on."""

import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.distributed.checkpoint.folder import CheckpointNotSavedError
from lightning_parstrat.distributed.checkpoint.writing import RunningSave
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


class FileExists:
    """Stands in for a ModelCheckpoint's ``file_exists``: also files count that a save is going to make.

    ModelCheckpoint adds a version to a name that exists, and would miss a checkpoint that is still being written.

    Args:
        callback: The ModelCheckpoint.
        pending: The save in progress.
    """

    def __init__(self, callback: ModelCheckpoint, pending: PendingSave) -> None:
        self._callback = callback
        self._pending = pending

    def __call__(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Whether there is or will be such a file, the same on all ranks. Collective."""
        if type(self._callback).file_exists(self._callback, filepath, trainer):
            return True
        will_be = trainer.is_global_zero and self._pending.will_make(str(filepath))
        return trainer.strategy.reduce_boolean_decision(will_be, all=False)


def prepare_callbacks(callbacks: list[ModelCheckpoint], pending: PendingSave) -> None:
    """Has callbacks know of checkpoints that are being written.

    Raises:
        MisconfigurationException: One links to the latest.
    """
    if any(callback.save_last == "link" for callback in callbacks):
        raise MisconfigurationException(
            "`ModelCheckpoint(save_last='link')` would link to a checkpoint that async_save=True is still writing."
            " Use `save_last=True`."
        )
    for callback in callbacks:
        if "file_exists" not in vars(callback):
            callback.file_exists = FileExists(callback, pending)
