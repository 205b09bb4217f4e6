"""Turns a sharded checkpoint into one file without holding it in memory. Not collective."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.core.tensor_trees import in_storage_order, leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.reading import Run, ShardedCheckpoint
from lightning_parstrat.distributed.durable_files import written_durably
from lightning_parstrat.distributed.torch_compat import load_layout, offset_in_file


def consolidate(checkpoint: ShardedCheckpoint, destination: Path, progress: Callable[[int], object]) -> None:
    """Writes an ordinary checkpoint, as ``torch.save`` would.

    The file is first laid out without its tensors' elements, which are then filled in, one rank's piece at a time.
    Host peak: twice the largest piece, and what is not in the ranks' files (loops, callbacks, random numbers).

    Args:
        checkpoint: The sharded checkpoint.
        destination: The file; an existing one is replaced when all is written.
        progress: Called with the number of bytes written since its last call.

    Raises:
        ValueError: There are tensors in objects that cannot be searched.
        OSError: It could not be written; an existing file is unchanged.
    """
    with written_durably(destination) as temporary:
        with open(temporary, "xb") as file, torch.serialization.skip_data():
            torch.save(replace_leaves(checkpoint.skeleton, _room_for(checkpoint)), file)
        laid_out = load_layout(temporary)
        with open(temporary, "r+b") as file:
            # Both trees are walked alike, so that each tensor of the one finds its place in the other.
            places = {leaf.path: leaf.tensor for leaf in leaves(laid_out)}
            written: set[int] = set()
            for leaf in leaves(checkpoint.skeleton):
                offset = offset_in_file(places[leaf.path])
                # Tied tensors share a storage.
                if offset in written:
                    continue
                written.add(offset)
                for start, elements in _pieces_of(checkpoint, leaf.tensor):
                    file.seek(offset + start * elements.itemsize)
                    # As bytes: numpy has no bfloat16.
                    file.write(elements.view(torch.uint8).numpy().data)
                    progress(elements.nbytes)
        # Tensors that no walk over the tree reaches would stay as they were laid out: garbage.
        if len(written) != _storages_in(temporary):
            raise ValueError(
                f"{checkpoint.folder} holds tensors in objects other than dictionaries, lists and tuples (sets, or"
                " instances of custom classes), and these cannot be moved to one file this way. Load it in a training"
                " with checkpoint_format='full', and save from there."
            )


def consolidated_bytes(checkpoint: ShardedCheckpoint) -> int:
    """Bytes that :func:`consolidate` writes; tied tensors count once."""
    return sum({id(leaf.tensor): leaf.tensor.nbytes for leaf in leaves(checkpoint.skeleton)}.values())


def _room_for(checkpoint: ShardedCheckpoint) -> Callable[[Tensor], Tensor]:
    """Tensors for the layout: memory that is allocated but never touched takes no pages."""
    made: dict[int, Tensor] = {}

    def room(tensor: Tensor) -> Tensor:
        if checkpoint.name_of(tensor) is None:
            return in_storage_order(tensor.detach()).clone().as_strided(tensor.shape, _strides(tensor))
        if id(tensor) not in made:
            # One for each tensor of the skeleton, so that tied tensors stay tied in the file.
            made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return made[id(tensor)]

    return room


def _storages_in(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(name.rpartition("/data/")[2].isdecimal() for name in archive.namelist() if "/data/" in name)


def _strides(tensor: Tensor) -> Any:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


def _pieces_of(checkpoint: ShardedCheckpoint, tensor: Tensor) -> Any:
    """First position and elements, 1-D, of each piece."""
    name = checkpoint.name_of(tensor)
    if name is None:
        yield 0, in_storage_order(tensor.detach()).clone()
        return
    for start, numel in checkpoint.pieces_of(name):
        elements = torch.empty(numel, dtype=tensor.dtype)
        checkpoint.read({name: Run(elements, start)})
        yield start, elements
