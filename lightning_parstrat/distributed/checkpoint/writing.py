"""A checkpoint that all ranks write together, by ``torch.distributed.checkpoint``: a file of each rank, and an index.

Each tensor is 1-D in it, with its elements in memory order. So a shard is one run of them at any world size. Rank 0
also writes the checkpoint in Lightning's form, with placeholders for these tensors. No tensor is gathered.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_parstrat.core.tensor_trees import leaves, with_narrow_storage
from lightning_parstrat.distributed.checkpoint.folder import SKELETON, CheckpointNotSavedError
from lightning_parstrat.distributed.checkpoint.tensors import WrittenTensors, name_of, refuse_changed
from lightning_parstrat.distributed.comm.agreement import from_first_rank
from lightning_parstrat.distributed.durable_files import clean_up, temporary_for, with_errors_of_the_disk
from lightning_parstrat.distributed.engine.cuts import Run


class Outline(NamedTuple):
    """The message about a save that rank 0 sends to the others: the folder, and each tensor's dtype and elements."""

    temporary: Path
    tensors: dict[str, tuple[torch.dtype, int]]


def save_sharded(
    checkpoint: Any,
    path: Path,
    tensors: WrittenTensors,
    group: dist.ProcessGroup,
    asynchronous: bool = False,
) -> Callable[[], None] | None:
    """Writes a checkpoint, each rank its part. Collective.

    Rank 0 sends the others the list of tensors (about 100 bytes each). From the cuts, each rank knows which part it
    writes. When each rank has written and synced its own file, rank 0 writes the index and gives the folder its name.

    Args:
        checkpoint: Rank 0's checkpoint, with placeholders in it. Those of other ranks are ignored.
        path: The folder. An existing one is replaced when all is written. All ranks must see the same file system.
        tensors: Finds this rank's part of the tensors behind placeholders.
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

    from lightning_parstrat.distributed.checkpoint.dcp import FolderWriter, RunsOfRank

    outline = from_first_rank(
        lambda: _prepare(checkpoint, path), group, lambda failure: _not_saved(path, f"rank 0: {failure}")
    )
    runs: dict[str, Run] = {}
    failure: Exception | None = None
    try:
        for name, (dtype, _) in outline.tensors.items():
            run = tensors.own_run(name)
            if run is not None:
                # Not as a part of a larger storage: torch would copy the part, and keep the copy until all is written.
                part = with_narrow_storage(run.elements.to(dtype))
                copied = torch.empty_like(part, device="cpu").copy_(part) if asynchronous else part
                runs[name] = Run(run.start, copied)
    except Exception as error:
        # The other ranks get the error when torch collects plans.
        failure = error
    arguments: dict[str, Any] = {
        "storage_writer": FolderWriter(outline.temporary, path, outline.tensors),
        "planner": RunsOfRank(runs, failure),
        "process_group": group,
    }
    # One rank cleans up. Several would disturb each other on a shared file system.
    removed = outline.temporary if dist.get_rank(group) == 0 else None
    # torch gets no tensors: it would copy those of an asynchronous save as a whole, and runs are views of buckets.
    if asynchronous:
        running = async_save({}, **arguments)
        return lambda: _complete(path, running.result, removed)  # type: ignore[union-attr]
    _complete(path, lambda: save({}, **arguments), removed)
    return None


def _complete(path: Path, save: Callable[[], Any], temporary: Path | None) -> None:
    """Saves, or waits for the save. Raises one error for the failures of all ranks."""
    try:
        save()
    except BaseException as error:
        if temporary is not None:
            clean_up(temporary)
        failures: Mapping[int, Any] | None = getattr(error, "failures", None)
        if failures is None:
            raise
        # The first four: a full disk fails on every rank, with the same words.
        why = "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(failures.items())[:4])
        raise _not_saved(path, why) from error


def _not_saved(path: Path, why: str) -> CheckpointNotSavedError:
    return CheckpointNotSavedError(f"{path} was not saved: {why}. Checkpoints that were saved before are unchanged.")


def _prepare(checkpoint: Any, path: Path) -> Outline:
    """Does everything that may fail on rank 0 before any rank writes: for example, objects that cannot be pickled."""
    refuse_changed(
        checkpoint,
        "In a sharded checkpoint, placeholders or shards stand for tensors until all ranks write them.",
        "use state_dict_type='full'",
    )
    temporary = temporary_for(path)
    named = ((name_of(leaf.tensor), leaf.tensor) for leaf in leaves(checkpoint))
    tensors = {name: (tensor.dtype, tensor.numel()) for name, tensor in named if name is not None}
    temporary.mkdir()
    try:
        # Now, as training may change the checkpoint's objects before an asynchronous save has ended.
        with with_errors_of_the_disk(), open(temporary / SKELETON, "xb") as file:
            torch.save(checkpoint, file)
    except BaseException:
        clean_up(temporary)
        raise
    return Outline(temporary, tensors)
