"""A checkpoint that is being written while training goes on."""

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.distributed.durable_files import remove_whole
from lightning_parstrat.distributed.sharded_checkpoint import CheckpointNotSavedError, RunningSave


class PendingSave:
    """At most one save that is under way, and what is to be removed when it is done.

    All ranks call its methods at the same points.

    Args:
        removes: Whether this rank is the one that removes.
    """

    def __init__(self, removes: bool) -> None:
        self._removes = removes
        self._save: RunningSave | None = None
        self._obsolete: list[Path] = []

    def begin(self, save: RunningSave) -> None:
        """Takes note of a save that has begun; :meth:`finish` has been called before."""
        self._save = save

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun that nobody has waited for."""
        return self._save is not None

    def remove_later(self, path: Path) -> None:
        """Removes a checkpoint when its successor is whole, and not at all if that fails."""
        self._obsolete.append(path)

    def finish(self) -> None:
        """Waits for the save that is under way.

        Raises:
            CheckpointNotSavedError: It has failed on any rank.
        """
        save, self._save = self._save, None
        obsolete, self._obsolete = self._obsolete, []
        if save is None:
            return
        try:
            save.wait()
        except CheckpointNotSavedError:
            kept = [str(path) for path in obsolete if path.exists()]
            if kept:
                rank_zero_warn(f"{', '.join(kept)} would have been removed, and is kept.")
            raise
        if self._removes:
            for path in obsolete:
                remove_whole(path)

    def abandon(self) -> None:
        """Waits for the save that is under way, whatever comes of it, and removes nothing."""
        save, self._save = self._save, None
        self._obsolete = []
        if save is not None:
            try:
                save.wait()
            except RuntimeError as error:
                rank_zero_warn(f"{save.path} was not saved: {error}")
