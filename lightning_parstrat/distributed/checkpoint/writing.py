"""A checkpoint that all ranks write together: one file of each rank in a folder, an index, and one more.

In these files each tensor is 1-D, its elements in the order in which they lay in memory, so that a shard is one run of
them at any world size. ``checkpoint.pt`` is the checkpoint as Lightning knows it, with tensors on the meta device in
place of those in the other files. What each rank alone has to say (random numbers) ends its file: nothing is gathered.
"""

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.checkpoint.folder import METADATA, SKELETON, CheckpointNotSavedError
from lightning_parstrat.distributed.checkpoint.index import CheckpointIndex, StoredPiece, file_of
from lightning_parstrat.distributed.checkpoint.pieces import CheckpointPieces, Named, Placeholders, sources_in
from lightning_parstrat.distributed.checkpoint.zipped import write_zipped
from lightning_parstrat.distributed.comm.agreement import all_or_none, from_first_rank
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.durable_files import (
    check_may_be_replaced,
    put_in_place,
    remove,
    remove_left_behind,
    sync,
    temporary_name,
)

PartOf = Callable[[StoredPiece], Tensor]
"""The elements of a piece that this rank writes: 1-D, in storage order."""


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
        self._future.result()


class Outline(NamedTuple):
    """What rank 0 sends the others about a save."""

    temporary: str
    named: dict[str, Named]


def save_sharded(
    checkpoint: Any,
    path: Path,
    pieces: CheckpointPieces,
    placeholders: Placeholders,
    own: Any,
    group: dist.ProcessGroup,
    asynchronous: bool = False,
) -> RunningSave | None:
    """Writes a checkpoint, each rank its part. Collective.

    Rank 0 sends the others the list of tensors (about 100 bytes each); where each rank writes what, all know by the
    layout. Each rank writes and syncs a file of its own; when all have, rank 0 writes the rest and gives the folder its
    name. Whether all have is three small reductions.

    Args:
        checkpoint: Rank 0's, with ``placeholders`` in it; those of other ranks are ignored.
        path: The folder; an existing one is replaced when all is written. All ranks must see the same file system.
        pieces: Finds this rank's part of what placeholders stand for.
        placeholders: Those in ``checkpoint``.
        own: What this rank alone has to say, some kilobytes; it is pickled before this returns.
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
    control = make_collectives(group, torch.device("cpu"))
    folder = _Folder(Path(outline.temporary), path, pieces.index(outline.named), control)

    def part_of(piece: StoredPiece) -> Tensor:
        return pieces.part(outline.named[piece.name], piece.start, piece.numel)

    if not asynchronous:
        folder.write(part_of, lambda: _pickled(own), skeleton)
        return None
    copied = _Copied(folder.own_pieces, part_of, own)
    thread = ThreadPoolExecutor(1, "lightning_parstrat: save")
    future = thread.submit(folder.write, copied.take, copied.pickled, skeleton)
    thread.shutdown(wait=False)
    return RunningSave(path, future)


class _Copied:
    """What one rank will write, as it is now: training changes it.

    What cannot be copied the others learn where they learn what cannot be written: in :meth:`pickled`.

    Args:
        pieces: Those of this rank.
        part_of: Finds their elements.
        own: What this rank alone has to say: a loader's state, say.
    """

    def __init__(self, pieces: Sequence[StoredPiece], part_of: PartOf, own: Any) -> None:
        self._copies: dict[str, Tensor] = {}
        self._pickled = b""
        self._failure: Exception | None = None
        try:
            self._pickled = _pickled(own)
            for piece in pieces:
                part = part_of(piece)
                self._copies[piece.name] = torch.empty_like(part, device="cpu").copy_(part)
        except Exception as error:
            self._failure = error

    def pickled(self) -> bytes:
        """What this rank alone has to say; raises what has kept anything from being copied."""
        if self._failure is not None:
            raise self._failure
        return self._pickled

    def take(self, piece: StoredPiece) -> Tensor:
        """The elements of a piece, once: their memory is the caller's."""
        return self._copies.pop(piece.name)


def write_shard(path: Path, pieces: list[StoredPiece], part_of: PartOf, own: bytes, own_begins: int) -> None:
    """Writes one rank's file, and returns when it is on the disk. The interpreter is free for most of that time.

    Args:
        path: Must not exist.
        pieces: What is in it, in order.
        part_of: Asked for one after the other.
        own: What is behind them.
        own_begins: Its position in the file.
    """
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(bytes(piece.position - file.tell()))
            write_zipped(part_of(piece).to("cpu", piece.dtype).contiguous(), file)
        file.write(bytes(own_begins - file.tell()))
        file.write(own)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class _Folder:
    """A folder that is being written.

    Attributes:
        temporary: What it is called meanwhile.
        path: Its name.
        index: What is in it.
        control: Of all ranks; works on host memory.
    """

    temporary: Path
    path: Path
    index: CheckpointIndex
    control: Collectives

    @property
    def own_pieces(self) -> list[StoredPiece]:
        """What this rank writes."""
        return self.index.of_rank(self.control.rank)

    def write(self, part_of: PartOf, own: Callable[[], bytes], skeleton: io.BytesIO) -> None:
        """Writes it, and gives it its name. Collective.

        Args:
            part_of: Of what this rank writes.
            own: What this rank alone has to say; asked for first.
            skeleton: Rank 0's.

        Raises:
            CheckpointNotSavedError: Some rank could not write; the same on all ranks.
        """
        try:
            self._together(lambda: self._write_own(part_of, own()))
            self._together(lambda: self._complete(skeleton))
            self._together(self._put_in_place)
        except BaseException:
            # One rank cleans up: several would get in each other's way on a shared file system.
            if self.control.rank == 0:
                remove(self.temporary)
            raise

    def _together(self, action: Callable[[], None]) -> None:
        """Does something on all ranks, and fails on all if any has failed. Collective."""
        all_or_none(action, self.control, self._not_saved)

    def _not_saved(self, failed: Mapping[int, str]) -> CheckpointNotSavedError:
        # The first four: a full disk fails on every rank, with the same words.
        said = "; ".join(f"rank {rank}: {error}" for rank, error in list(failed.items())[:4])
        return CheckpointNotSavedError(
            f"{self.path} was not saved: {said}. Checkpoints that were saved before are unchanged."
        )

    def _write_own(self, part_of: PartOf, own: bytes) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        rank = self.control.rank
        write_shard(self.temporary / file_of(rank), self.own_pieces, part_of, own, self.index.end_of(rank))

    def _complete(self, skeleton: io.BytesIO) -> None:
        self._look_for_next()
        if self.control.rank == 0:
            _write(self.temporary / SKELETON, skeleton.getbuffer())
            _write(self.temporary / METADATA, pickle.dumps(self.index))
            # Before the rename: after a crash, a folder with its final name must hold all of its files.
            sync(self.temporary)

    def _look_for_next(self) -> None:
        """Each rank looks for the file of the next: with folders of their own, nobody has them all."""
        next_rank = (self.control.rank + 1) % self.control.world_size
        name = file_of(next_rank)
        # Longer than its pieces, as something follows them.
        if not _has_size(self.temporary / name, self.index.end_of(next_rank) + 1):
            raise OSError(
                f"Rank {next_rank} has written {name}, but rank {self.control.rank} does not see that in"
                f" {self.temporary}. A sharded checkpoint needs a folder that all nodes share: set `dirpath` of"
                " ModelCheckpoint, or `default_root_dir` of the Trainer, to one."
            )

    def _put_in_place(self) -> None:
        if self.control.rank == 0:
            put_in_place(self.temporary, self.path)


def _agree_on_outline(
    checkpoint: Any, path: Path, placeholders: Placeholders, skeleton: io.BytesIO, group: dist.ProcessGroup
) -> Outline:
    """Rank 0 prepares the save and sends the outline, or its failure: the others wait for either. Collective."""
    return from_first_rank(
        lambda: _prepare(checkpoint, path, placeholders, skeleton),
        group,
        lambda said: CheckpointNotSavedError(f"{path} was not saved: rank 0: {said}"),
    )


def _prepare(checkpoint: Any, path: Path, placeholders: Placeholders, skeleton: io.BytesIO) -> Outline:
    """Everything that may fail on rank 0 before any rank writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_may_be_replaced(path)
    remove_left_behind(path.parent)
    copied = [leaf.name for leaf in leaves(checkpoint) if _lacks_elements(leaf.tensor, placeholders)]
    if copied:
        raise ValueError(
            f"In a sharded checkpoint, placeholders or shards stand for tensors until all ranks write them. A hook has"
            f" copied or changed {', '.join(copied[:3])}: leave them as they are, or use checkpoint_format='full'."
        )
    # Into memory, and now: what cannot be pickled fails before gigabytes have been written; and training may go on, and
    # change the checkpoint's objects, before the file is written.
    torch.save(checkpoint, skeleton)
    return Outline(str(temporary_name(path.parent)), sources_in(checkpoint, placeholders))


def _lacks_elements(tensor: Tensor, placeholders: Placeholders) -> bool:
    is_part = tensor.device.type == "meta" or isinstance(tensor, DTensor)
    return is_part and placeholders.source_of(tensor) is None


def _pickled(own: Any) -> bytes:
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size >= size


def _write(path: Path, content: Any) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
