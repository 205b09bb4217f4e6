"""A checkpoint that is being written while training continues."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.distributed.checkpoint.folder import CheckpointNotSavedError
from lightning_parstrat.distributed.durable_files import remove_atomically


class PendingSave:
    """At most one save in progress, and the checkpoints to remove when it has succeeded.

    All ranks must call its methods at the same points.
    """

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None
        self._obsolete: list[Path] = []

    def begin(self, wait: Callable[[], None]) -> None:
        """Keeps the function that waits for a new save. The save before must have been finished."""
        self._wait = wait

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun that no call has waited for."""
        return self._wait is not None

    def remove_later(self, path: Path) -> None:
        """Removes a checkpoint when its successor is complete. If the successor fails, the checkpoint stays."""
        self._obsolete.append(path)

    def finish(self, removes: bool) -> None:
        """Waits for the save in progress, and removes the checkpoints that it has made obsolete.

        Args:
            removes: Whether this rank removes them.

        Raises:
            CheckpointNotSavedError: The save has failed on any rank.
        """
        # Cleared first: a failed save has ended, too, and must not be waited for again.
        wait, self._wait = self._wait, None
        obsolete, self._obsolete = self._obsolete, []
        if wait is None:
            return
        try:
            wait()
        except CheckpointNotSavedError:
            kept = [str(path) for path in obsolete if path.exists()]
            if kept:
                rank_zero_warn(f"Kept because its successor was not saved: {', '.join(kept)}.")
            raise
        if removes:
            for path in obsolete:
                remove_atomically(path)


def exists_when_saved(
    callback: ModelCheckpoint, wait: Callable[[], None], filepath: str | Path, trainer: Trainer
) -> bool:
    """Replaces a ModelCheckpoint's ``file_exists``: first it waits for a save that may make that file. Collective.

    ModelCheckpoint adds a version to a name that exists. It calls this before each save, which would wait as well.
    """
    wait()
    return type(callback).file_exists(callback, filepath, trainer)


def prepare_callbacks(callbacks: list[ModelCheckpoint], wait: Callable[[], None]) -> None:
    """Makes callbacks wait for a save in progress before they look for a free name.

    Raises:
        MisconfigurationException: A callback links to the latest checkpoint.
    """
    if any(callback.save_last == "link" for callback in callbacks):
        raise MisconfigurationException(
            "`ModelCheckpoint(save_last='link')` would link to a checkpoint that async_save=True is still writing."
            " Use `save_last=True`."
        )
    for callback in callbacks:
        if "file_exists" not in vars(callback):
            callback.file_exists = partial(exists_when_saved, callback, wait)
