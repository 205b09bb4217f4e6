"""Turns a sharded checkpoint into one file without holding it in memory. Not collective."""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.checkpoint.pieces import source_of
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.durable_files import with_errors_of_the_disk, written_durably

_ALIGNMENT = 64


def consolidate(checkpoint: ShardedCheckpoint, destination: Path) -> None:
    """Writes an ordinary checkpoint, as ``torch.save`` would.

    Tensors are read into an unnamed file beside it, as large as the checkpoint. The kernel keeps as much of the file in
    memory as it has room for.

    Args:
        checkpoint: The sharded checkpoint.
        destination: The file. An existing one is replaced when all is written.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
    """
    found = {source: leaf.tensor for leaf in leaves(checkpoint.skeleton) if (source := source_of(leaf.tensor))}
    nbytes = sum(_aligned(tensor.nbytes) for tensor in found.values())
    with written_durably(destination) as temporary, tempfile.TemporaryFile(dir=destination.parent) as file:
        # Not later, when memory is written: a full disk would then end the process.
        os.posix_fallocate(file.fileno(), 0, nbytes + _ALIGNMENT)
        memory, end = mmap.mmap(file.fileno(), nbytes + _ALIGNMENT), 0

        def room(tensor: Tensor) -> Tensor:
            nonlocal end
            if not tensor.numel():
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            begin, end = end, end + _aligned(tensor.nbytes)
            # Each tensor has a separate storage, as it is saved.
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            return flat.as_strided(tensor.shape, tensor.stride())

        whole = checkpoint.filled(checkpoint.skeleton, room=room)
        with with_errors_of_the_disk(), open(temporary, "xb") as target:
            torch.save(whole, target)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
