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

    Tensors are read into a file beside it that has no name, and that is as large as the checkpoint: the kernel keeps in
    memory what it has room for.

    Args:
        checkpoint: The sharded checkpoint.
        destination: The file; an existing one is replaced when all is written.

    Raises:
        OSError: It could not be written; an existing file is unchanged.
    """
    found = {source: leaf.tensor for leaf in leaves(checkpoint.skeleton) if (source := source_of(leaf.tensor))}
    nbytes = sum(_aligned(tensor.nbytes) for tensor in found.values())
    with written_durably(destination) as temporary, tempfile.TemporaryFile(dir=destination.parent) as file:
        # Not where memory is written: there a full disk would end the process.
        os.posix_fallocate(file.fileno(), 0, nbytes + _ALIGNMENT)
        memory, end = mmap.mmap(file.fileno(), nbytes + _ALIGNMENT), 0

        def room(tensor: Tensor) -> Tensor:
            nonlocal end
            if not tensor.numel():
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            begin, end = end, end + _aligned(tensor.nbytes)
            # Each with a storage of its own, as it is saved.
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            return flat.as_strided(tensor.shape, tensor.stride())

        whole = checkpoint.filled(checkpoint.skeleton, room=room)
        with with_errors_of_the_disk(), open(temporary, "xb") as target:
            torch.save(whole, target)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
