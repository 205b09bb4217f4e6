"""A checkpoint that is being written while training goes on."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException

from lightning_parstrat.distributed.durable_files import remove_whole


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written; what was there before is as it was."""


def not_saved(path: Path, error: CheckpointException) -> CheckpointNotSavedError:
    """The error of those ranks that had one, for all ranks."""
    failures = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())[:4])
    return CheckpointNotSavedError(f"{path} was not saved: {failures}. What was saved before is as it was.")


class PendingSave:
    """At most one save that is under way, and what is to be removed when it is done.

    All ranks call its methods at the same points.

    Args:
        removes: Whether this rank is the one that removes.
    """

    def __init__(self, removes: bool) -> None:
        self._removes = removes
        self._path = Path()
        self._future: Future[Any] | None = None
        self._obsolete: list[Path] = []

    def begin(self, path: Path, future: "Future[Any]") -> None:
        """Takes note of a save that has begun; :meth:`finish` has been called before."""
        self._path, self._future = path, future

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun that nobody has waited for."""
        return self._future is not None

    def remove_later(self, path: Path) -> None:
        """Removes a checkpoint when its successor is whole, and not at all if that fails."""
        self._obsolete.append(path)

    def finish(self) -> None:
        """Waits for the save that is under way.

        Raises:
            CheckpointNotSavedError: It has failed on any rank.
        """
        future, self._future = self._future, None
        obsolete, self._obsolete = self._obsolete, []
        if future is None:
            return
        try:
            future.result()
        except CheckpointException as error:
            kept = [str(path) for path in obsolete if path.exists()]
            if kept:
                rank_zero_warn(f"{', '.join(kept)} would have been removed, and is kept.")
            raise not_saved(self._path, error) from error
        if self._removes:
            for path in obsolete:
                remove_whole(path)

    def abandon(self) -> None:
        """Waits for the save that is under way, whatever comes of it, and removes nothing."""
        future, self._future = self._future, None
        self._obsolete = []
        if future is not None:
            error = future.exception()
            if error is not None:
                rank_zero_warn(f"{self._path} was not saved: {error!r}")
