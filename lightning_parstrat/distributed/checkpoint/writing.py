"""A checkpoint that all ranks write together, by ``torch.distributed.checkpoint``: a file of each rank, and an index.

Each tensor is 1-D in it, with its elements in memory order. So a shard is one run of them at any world size. Rank 0
also writes the checkpoint in Lightning's form, with placeholders for these tensors. State that each rank alone needs to
resume (random numbers) is in its file. Nothing is gathered.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.tensor_trees import leaves, with_narrow_storage
from lightning_parstrat.distributed.checkpoint.folder import SKELETON, CheckpointNotSavedError, states_of
from lightning_parstrat.distributed.checkpoint.pieces import CheckpointPieces, TensorSource, source_of
from lightning_parstrat.distributed.comm.agreement import from_first_rank
from lightning_parstrat.distributed.durable_files import (
    check_may_be_replaced,
    remove,
    remove_left_behind,
    temporary_name,
)


class Outline(NamedTuple):
    """The message about a save that rank 0 sends to the others."""

    temporary: str
    sources: dict[TensorSource, torch.dtype]


def save_sharded(
    checkpoint: Any,
    path: Path,
    pieces: CheckpointPieces,
    own: Any,
    group: dist.ProcessGroup,
    asynchronous: bool = False,
) -> Callable[[], None] | None:
    """Writes a checkpoint, each rank its part. Collective.

    Rank 0 sends the others the list of tensors (about 100 bytes each). From the cuts, all ranks know which rank
    writes which part. When each rank has written and synced its own file, rank 0 writes the index and gives the folder
    its name.

    Args:
        checkpoint: Rank 0's checkpoint, with placeholders in it. Those of other ranks are ignored.
        path: The folder. An existing one is replaced when all is written. All ranks must see the same file system.
        pieces: Finds this rank's part of the tensors behind placeholders.
        own: State that this rank alone needs to resume, such as a loader's.
        group: The group of all ranks. It works on host memory.
        asynchronous: Whether to return when this rank has copied its part to host memory, while a thread writes the
            part. Until that save is waited for, only the thread may use the group.

    Returns:
        If it is asynchronous, a function that returns when the folder is complete, and raises as this function does.

    Raises:
        CheckpointNotSavedError: Some rank could not write. An existing folder at ``path`` is unchanged.
    """
    # Here, as it takes long to import.
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from lightning_parstrat.distributed.checkpoint.dcp import PiecesPlanner, PiecesWriter

    skeleton = io.BytesIO()
    outline = from_first_rank(
        lambda: _prepare(checkpoint, path, skeleton), group, lambda failure: _not_saved(path, f"rank 0: {failure}")
    )
    rank, tensors = dist.get_rank(group), pieces.tensors(outline.sources)
    own_pieces = list(pieces.of_rank(tensors, rank))
    held: dict[str, Tensor | io.BytesIO] | Exception
    try:
        held = {SKELETON: skeleton} if rank == 0 else {}
        held[states_of(rank)] = resumes = io.BytesIO()
        torch.save(own, resumes)
        for piece in own_pieces:
            # Not as a part of a larger storage: torch would copy the part, and keep the copy until all is written.
            part = with_narrow_storage(pieces.part(piece).to(piece.tensor.dtype))
            copied = torch.empty_like(part, device="cpu").copy_(part) if asynchronous else part
            held[piece.tensor.source.name] = copied
    except Exception as error:
        # The other ranks get the error when torch collects plans.
        held = error
    temporary = Path(outline.temporary)
    arguments: dict[str, Any] = {
        "storage_writer": PiecesWriter(temporary, path, tensors, pieces.of_rank(tensors)),
        "planner": PiecesPlanner(own_pieces),
        "process_group": group,
    }
    if asynchronous:
        running = async_save({"held": held}, **arguments)
        return lambda: _complete(path, running.result, temporary if rank == 0 else None)  # type: ignore[union-attr]
    _complete(path, lambda: save({"held": held}, **arguments), temporary if rank == 0 else None)
    return None


def _complete(path: Path, save: Callable[[], Any], temporary: Path | None) -> None:
    """Saves, or waits for the save. Raises one error for the failures of all ranks."""
    try:
        save()
    except BaseException as error:
        # One rank cleans up. Several would disturb each other on a shared file system.
        if temporary is not None:
            remove(temporary)
        failures: Mapping[int, Any] | None = getattr(error, "failures", None)
        if failures is None:
            raise
        # The first four: a full disk fails on every rank, with the same words.
        why = "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(failures.items())[:4])
        raise _not_saved(path, why) from error


def _not_saved(path: Path, why: str) -> CheckpointNotSavedError:
    return CheckpointNotSavedError(f"{path} was not saved: {why}. Checkpoints that were saved before are unchanged.")


def _prepare(checkpoint: Any, path: Path, skeleton: io.BytesIO) -> Outline:
    """Does everything that may fail on rank 0 before any rank writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_may_be_replaced(path)
    remove_left_behind(path.parent)
    sources: dict[TensorSource, torch.dtype] = {}
    for leaf in leaves(checkpoint):
        source = source_of(leaf.tensor)
        if source is not None:
            sources[source] = leaf.tensor.dtype
        elif leaf.tensor.device.type == "meta" or isinstance(leaf.tensor, DTensor):
            raise ValueError(
                "In a sharded checkpoint, placeholders or shards stand for tensors until all ranks write them. A hook"
                f" has changed {leaf.name}: leave it as it is, or use state_dict_type='full'."
            )
    # Into memory, and now. An object that cannot be pickled fails before gigabytes have been written. Training may
    # continue, and change the checkpoint's objects, before the file is written.
    torch.save(checkpoint, skeleton)
    return Outline(str(temporary_name(path.parent)), sources)
