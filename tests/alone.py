"""Tests that measure time run while no other worker tests anything."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def beside_others(folder: Path, *, alone: bool) -> Iterator[None]:
    """Within it, no other process is within it where either of the two is alone.

    Args:
        folder: Where locks are kept; the same for all processes.
        alone: Waits until the others have left, and keeps them out.
    """
    with (folder / "turn.lock").open("w") as turn, (folder / "tests.lock").open("w") as tests:
        # Whoever waits to be alone holds the turn: others could follow each other without end.
        with _held(turn, fcntl.LOCK_EX):
            fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(tests, fcntl.LOCK_UN)


@contextmanager
def _held(lock: IO[str], operation: int) -> Iterator[None]:
    fcntl.flock(lock, operation)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
