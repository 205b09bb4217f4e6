"""A checkpoint that all ranks write together: files of ``torch.distributed.checkpoint`` in a folder, and one more.

In these files each tensor is 1-D, its elements in the order in which they lay in memory, so that a shard is one run of
them at any world size. ``checkpoint.pt`` is the checkpoint as Lightning knows it, with tensors on the meta device in
place of those in the other files.
"""

import io
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import leaves, with_narrow_storage
from lightning_parstrat.distributed.checkpoint.folder import SKELETON, CheckpointNotSavedError
from lightning_parstrat.distributed.checkpoint.pieces import CheckpointPieces, Piece, Placeholders, sources_in
from lightning_parstrat.distributed.comm.agreement import broadcast_object
from lightning_parstrat.distributed.durable_files import (
    check_may_be_replaced,
    put_in_place,
    remove,
    remove_left_behind,
    sync,
    temporary_name,
)


class RunningSave:
    """A checkpoint that a thread is writing.

    Args:
        path: The folder that is being written.
        future: Done when the folder is complete.
    """

    def __init__(self, path: Path, future: "Future[Any]") -> None:
        self.path = path
        self._future = future

    def wait(self) -> None:
        """Returns when the folder is complete.

        Raises:
            CheckpointNotSavedError: Some rank could not write.
        """
        with _failures_of_ranks(self.path):
            self._future.result()


class _Outline(NamedTuple):
    """What rank 0 sends the others about a save."""

    temporary: str
    sources: dict[str, Any]


def save_sharded(
    checkpoint: Any,
    path: Path,
    pieces: CheckpointPieces,
    placeholders: Placeholders,
    group: dist.ProcessGroup,
    asynchronous: bool = False,
) -> RunningSave | None:
    """Writes a checkpoint, each rank its part. Collective.

    Rank 0 sends the others the list of tensors (about 100 bytes each). Each rank writes and syncs a file of its own;
    when all have, rank 0 writes the rest and gives the folder its name.

    Args:
        checkpoint: Rank 0's, with ``placeholders`` in it; those of other ranks are ignored.
        path: The folder; an existing one is replaced when all is written. All ranks must see the same file system.
        pieces: Finds this rank's part of what placeholders stand for.
        placeholders: Those in ``checkpoint``.
        group: Works on host memory. Nothing else may use it until the save has ended.
        asynchronous: Whether to return as soon as this rank's part has been copied to host memory (its size is this
            rank's host peak). A thread does the rest.

    Returns:
        The save in progress; None where it has ended.

    Raises:
        CheckpointNotSavedError: Some rank could not write; an existing folder at ``path`` is unchanged.
    """
    skeleton = io.BytesIO()
    outline = _agree_on_outline(checkpoint, path, placeholders, skeleton, group)
    found = {name: pieces.of(source) for name, source in outline.sources.items()}
    own = {name: piece for name, piece in found.items() if piece is not None}
    # Narrow: otherwise torch would copy to the host, and write, the bucket that the piece lies in.
    tensors = {name: with_narrow_storage(piece.elements) for name, piece in own.items()}
    temporary = Path(outline.temporary)
    writer, planner = _FolderWriter(temporary, path, skeleton), _PiecePlanner(own)
    # One rank cleans up: several would get in each other's way on a shared file system.
    clean_up = remove if dist.get_rank(group) == 0 else _nothing
    if asynchronous:
        future = async_save(tensors, storage_writer=writer, planner=planner, process_group=group)
        if not isinstance(future, Future):
            raise AssertionError("torch.distributed.checkpoint.async_save has not returned a future")
        future.add_done_callback(lambda done: clean_up(temporary) if done.exception() is not None else None)
        return RunningSave(path, future)
    try:
        with _failures_of_ranks(path):
            save(tensors, storage_writer=writer, planner=planner, process_group=group)
    except BaseException:
        clean_up(temporary)
        raise
    return None


def _agree_on_outline(
    checkpoint: Any, path: Path, placeholders: Placeholders, skeleton: io.BytesIO, group: dist.ProcessGroup
) -> _Outline:
    """Rank 0 prepares the save and sends the outline, or its failure: the others wait for either. Collective."""
    outline, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            outline = _prepare(checkpoint, path, placeholders, skeleton)
        except Exception as error:
            failure = error
    received: tuple[_Outline, str | None] = broadcast_object(
        (outline, None if failure is None else repr(failure)), group
    )
    if received[1] is not None:
        raise CheckpointNotSavedError(f"{path} was not saved: rank 0: {received[1]}") from failure
    return received[0]


def _prepare(checkpoint: Any, path: Path, placeholders: Placeholders, skeleton: io.BytesIO) -> _Outline:
    """Everything that may fail on rank 0 before any rank writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_may_be_replaced(path)
    remove_left_behind(path.parent)
    copied = [leaf.name for leaf in leaves(checkpoint) if _has_no_elements(leaf.tensor, placeholders)]
    if copied:
        raise ValueError(
            f"In a sharded checkpoint the optimizers' tensors are placeholders until all ranks write them. A hook has"
            f" copied or changed {', '.join(copied[:3])}: leave them as they are, or use checkpoint_format='full'."
        )
    # Into memory, and now: what cannot be pickled fails before gigabytes have been written; and training may go on, and
    # change the checkpoint's objects, before the file is written.
    torch.save(checkpoint, skeleton)
    return _Outline(str(temporary_name(path.parent)), sources_in(checkpoint, placeholders))


def _has_no_elements(tensor: Tensor, placeholders: Placeholders) -> bool:
    return tensor.device.type == "meta" and placeholders.source_of(tensor) is None


class _PiecePlanner(DefaultSavePlanner):
    """Tells torch which part of a larger tensor each 1-D tensor is."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._places = {name: (piece.start, piece.numel) for name, piece in pieces.items()}

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._write_item(name, tensor) for name, tensor in self.state_dict.items()])
        return self.plan

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def _write_item(self, name: str, tensor: Any) -> WriteItem:
        start, numel = self._places[name]
        return WriteItem(
            index=MetadataIndex(name, torch.Size([start])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size([start]), sizes=tensor.shape),
                properties=TensorProperties.create_from_tensor(tensor),
                size=torch.Size([numel]),
            ),
        )


class _FolderWriter(FileSystemWriter):
    """Gives the folder its name when it is complete."""

    def __init__(self, folder: Path, name: Path, skeleton: io.BytesIO) -> None:
        super().__init__(folder)
        self._name = name
        self._skeleton = skeleton

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 when all ranks have written."""
        # Rank 0 looks for what others wrote: with a folder on each node's own disk, every rank succeeds and nobody has
        # it all.
        sizes: dict[str, int] = {}
        for result in (result for of_rank in results for result in of_rank):
            end = result.storage_data.offset + result.storage_data.length
            sizes[result.storage_data.relative_path] = max(end, sizes.get(result.storage_data.relative_path, 0))
        unseen = [name for name, size in sizes.items() if not _has_size(Path(self.path) / name, size)]
        if unseen:
            raise OSError(
                f"Other ranks have written {', '.join(unseen[:5])}, but rank 0 does not see that in {self.path}. A"
                " sharded checkpoint needs a folder that all nodes share: set `dirpath` of ModelCheckpoint, or"
                " `default_root_dir` of the Trainer, to one."
            )
        super().finish(metadata, results)
        _write(Path(self.path) / SKELETON, self._skeleton.getbuffer())
        # Before the rename: after a crash, a folder with its final name must hold all of its files.
        sync(Path(self.path))
        put_in_place(Path(self.path), self._name)


@contextmanager
def _failures_of_ranks(path: Path) -> Iterator[None]:
    """Turns the errors of all ranks into one, the same on all ranks."""
    try:
        yield
    except CheckpointException as error:
        # The first four: a full disk fails on every rank, with the same words.
        failures = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())[:4])
        raise CheckpointNotSavedError(
            f"{path} was not saved: {failures}. Checkpoints that were saved before are unchanged."
        ) from error


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size >= size


def _write(path: Path, content: Any) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _nothing(_: Path) -> None:
    """Does nothing: rank 0 cleans up."""
