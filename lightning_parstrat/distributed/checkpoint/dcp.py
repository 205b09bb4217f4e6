"""The classes that ``torch.distributed.checkpoint`` needs: which rank writes and reads what. The import takes long."""

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config
from typing_extensions import override

from lightning_parstrat.distributed.checkpoint.folder import file_of
from lightning_parstrat.distributed.checkpoint.pieces import Piece, Run, SavedTensor
from lightning_parstrat.distributed.durable_files import put_in_place, sync, with_errors_of_the_disk

Held = Mapping[str, Tensor | io.BytesIO] | Exception
"""The content that a rank writes, by name, or the error that kept the rank from making it."""


class PiecesPlanner(SavePlanner):
    """Makes each rank write its pieces. No rank needs a message about them. The saved dictionary is ``{"held": Held}``.

    Args:
        pieces: This rank's pieces.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._held: Mapping[str, Tensor | io.BytesIO] = {}

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Raises the error that kept this rank from having its pieces. All ranks then raise."""
        if isinstance(state_dict["held"], Exception):
            raise state_dict["held"]
        self._held = state_dict["held"]

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # Broadcast when all is written. Rank 0 makes the metadata that is kept.
        return all_plans, Metadata({})

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        of_bytes = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(value.getbuffer().nbytes))
            for name, value in self._held.items()
            if isinstance(value, io.BytesIO)
        ]
        return dataclasses.replace(new_plan, items=[*of_bytes, *map(_item, self._pieces)])

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._held[write_item.index.fqn]


class PiecesWriter(FileSystemWriter):
    """torch's writer, but ranks send rank 0 only the places of their pieces, and rank 0 sends none back.

    Args:
        temporary: The folder that is written.
        path: The folder's name when it is complete.
        tensors: All tensors.
        pieces: The pieces of all ranks, or of this rank at least. Rank 0 needs those of all.
    """

    def __init__(self, temporary: Path, path: Path, tensors: Sequence[SavedTensor], pieces: Iterable[Piece]) -> None:
        super().__init__(temporary)
        self._temporary, self._final, self._tensors, self._pieces = temporary, path, tensors, pieces

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies nothing. Pieces are views of buckets of all ranks, which torch would copy as a whole."""
        return state_dict

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file. Rank 0 gets the offset and the length of each piece, in the order of the plan."""
        # No code reads checksums of elements, and they take as long as writing.
        with with_errors_of_the_disk(), config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner).value()
        places = {one.index: one.storage_data for one in written}
        of_pieces = [places[one.index] for one in plan.items if one.tensor_data is not None]
        flat = [number for place in of_pieces for number in (place.offset, place.length)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [*(one for one in written if one.index.offset is None), WriteResult(MetadataIndex(""), len(flat), flat)]
        )
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of what all ranks have written, and gives the folder its name. On rank 0 alone."""
        places = [iter(own.pop().storage_data) for own in results]
        known: dict[str, Any] = {one.index.fqn: BytesStorageMetadata() for own in results for one in own}
        known |= {
            one.source.name: TensorStorageMetadata(_properties(one.dtype), torch.Size([one.numel]), [])
            for one in self._tensors
        }
        # In torch's form for a place, taken from an entry that rank 0 has written beside its pieces.
        records, some = [], results[0][0].storage_data
        for piece in self._pieces:
            name, (offset, length) = piece.tensor.source.name, (next(places[piece.rank]), next(places[piece.rank]))
            known[name].chunks.append(_chunk(piece))
            place = dataclasses.replace(some, relative_path=file_of(piece.rank), offset=offset, length=length)
            records.append(WriteResult(MetadataIndex(name, [piece.start]), length, place))
        self._check_all_there(len(results))
        super().finish(Metadata(known), [*results, records])
        # Before the rename: after a crash, a folder with its final name must hold all of its files.
        sync(self._temporary)
        put_in_place(self._temporary, self._final)

    def _check_all_there(self, ranks: int) -> None:
        """Checks that rank 0 sees all files. If nodes have separate folders, it does not."""
        for rank in range(ranks):
            if not (self._temporary / file_of(rank)).exists():
                raise OSError(
                    f"Rank {rank} has written {file_of(rank)}, but rank 0 does not see that in {self._temporary}. A"
                    " sharded checkpoint needs a folder that all nodes share: set `dirpath` of ModelCheckpoint, or"
                    " `default_root_dir` of the Trainer, to one."
                )


class RunsPlanner(DefaultLoadPlanner):
    """Makes this process read runs of tensors, and bytes, which are then in :attr:`content`.

    Args:
        metadata: The checkpoint's index.
        wanted: Runs by name. None for bytes.
    """

    def __init__(self, metadata: Metadata, wanted: Mapping[str, Run | None]) -> None:
        super().__init__()
        self._known, self._wanted = metadata.state_dict_metadata, wanted
        self.content: dict[str, io.BytesIO] = {}

    @override
    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, run in self._wanted.items():
            known, none, index = self._known[name], torch.Size([0]), MetadataIndex(name)
            if run is None or not isinstance(known, TensorStorageMetadata):
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
                continue
            own = ChunkStorageMetadata(torch.Size([run.start]), torch.Size([run.target.numel()]))
            items += create_read_items_for_chunk_list(name, known, [own])
        return LoadPlan(items)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content[read_item.dest_index.fqn] = value

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        run = self._wanted[index.fqn]
        if run is None:
            raise AssertionError("a tensor was read instead of bytes")
        return run.target


def _item(piece: Piece) -> WriteItem:
    size, index = torch.Size([piece.tensor.numel]), MetadataIndex(piece.tensor.source.name, [piece.start])
    data = TensorWriteData(_chunk(piece), _properties(piece.tensor.dtype), size)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.numel]))


def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)
