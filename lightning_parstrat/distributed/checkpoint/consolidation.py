"""Turns a sharded checkpoint into one file without holding it in memory. Not collective."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.durable_files import with_errors_of_the_disk, written_durably


def consolidate(checkpoint: ShardedCheckpoint, destination: Path) -> None:
    """Writes an ordinary checkpoint, as ``torch.save`` would.

    Each tensor is read into an unnamed file beside it. The kernel keeps as much of these in memory as it has room for.

    Args:
        checkpoint: The sharded checkpoint.
        destination: The file. An existing one is replaced when all is written.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
    """

    def room(like: Tensor) -> Tensor:
        with tempfile.NamedTemporaryFile(dir=destination.parent) as file:
            # Not later, when memory is written: a full disk would then end the process.
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
            flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    with written_durably(destination) as temporary:
        whole = checkpoint.filled(checkpoint.skeleton, room=room)
        with with_errors_of_the_disk(), open(temporary, "xb") as target:
            torch.save(whole, target)
