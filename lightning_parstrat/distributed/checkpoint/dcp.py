"""The classes that ``torch.distributed.checkpoint`` needs: which rank writes and reads what. The import takes long."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
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

from lightning_parstrat.distributed.checkpoint.folder import SKELETON, file_of
from lightning_parstrat.distributed.durable_files import put_in_place, sync, with_errors_of_the_disk
from lightning_parstrat.distributed.engine.cuts import Run


class RunsOfRank(DefaultSavePlanner):
    """Makes each rank write its runs of elements. torch plans nothing, so no rank needs a message about them.

    Args:
        runs: This rank's runs, by the tensors' names.
        error: The error that kept this rank from having its runs.
    """

    def __init__(self, runs: Mapping[str, Run], error: Exception | None = None) -> None:
        super().__init__(flatten_state_dict=False)
        self._runs, self._error = runs, error

    @override
    def create_local_plan(self) -> SavePlan:
        """Raises the error. All ranks then raise."""
        if self._error is not None:
            raise self._error
        return super().create_local_plan()

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return dataclasses.replace(new_plan, items=[_item(name, run) for name, run in self._runs.items()])

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._runs[write_item.index.fqn].elements


class FolderWriter(FileSystemWriter):
    """torch's writer, but rank 0 makes the index of a few numbers for each run, and sends it to none.

    Args:
        temporary: The folder that is written.
        path: The folder's name when it is complete.
        tensors: The dtype and the number of elements of each tensor, by name. The same on all ranks.
    """

    def __init__(self, temporary: Path, path: Path, tensors: Mapping[str, tuple[torch.dtype, int]]) -> None:
        super().__init__(temporary)
        self._temporary, self._final, self._tensors = temporary, path, tensors

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file. Rank 0 gets, for each run, the tensor's number, start and length, and the place."""
        # No code reads checksums of elements, and they take as long as writing.
        with with_errors_of_the_disk(), config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner).value()
        number = {name: position for position, name in enumerate(self._tensors)}
        places = {one.index: one.storage_data for one in written}
        chunks = [(item.index, item.tensor_data.chunk) for item in plan.items if item.tensor_data is not None]
        runs = [
            (number[index.fqn], *chunk.offsets, *chunk.sizes, places[index].offset, places[index].length)
            for index, chunk in chunks
        ]
        future: Future[list[WriteResult]] = Future()
        # With one place in torch's form.
        future.set_result([WriteResult(MetadataIndex(""), len(runs), (next(iter(places.values()), None), runs))])
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of what all ranks have written, and gives the folder its name. On rank 0 alone."""
        names, bounds = list(self._tensors), defaultdict[str, list[tuple[int, int]]](list)
        written = []
        for rank, (of_rank,) in enumerate(results):
            # If nodes have separate folders, rank 0 does not see the other nodes' files.
            if not (self._temporary / file_of(rank)).exists():
                raise OSError(
                    f"Rank {rank} has written {file_of(rank)}, but rank 0 does not see that in {self._temporary}. A"
                    " sharded checkpoint needs a folder that all nodes share: set `dirpath` of ModelCheckpoint, or"
                    " `default_root_dir` of the Trainer, to one."
                )
            some, runs = of_rank.storage_data
            for number, start, numel, offset, length in runs:
                bounds[names[number]].append((start, start + numel))
                place = dataclasses.replace(some, offset=offset, length=length)
                written.append(WriteResult(MetadataIndex(names[number], [start]), length, place))
        index = Metadata({})
        for name, (dtype, numel) in self._tensors.items():
            starts, stops = zip(*sorted(bounds[name]), strict=True) if bounds[name] else ((), ())
            if (0, *stops) != (*starts, numel):
                raise ValueError(f"{name} is incomplete: some ranks have no such state of their part of the parameter")
            chunks = [_chunk(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
            properties, size = TensorProperties(dtype=dtype), torch.Size([numel])
            index.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)
        # Not the metadata that torch broadcasts.
        super().finish(index, [written])
        # Before the rename: after a crash, a folder with its final name must hold all of its files.
        for path in (self._temporary / SKELETON, self._temporary):
            sync(path)
        put_in_place(self._temporary, self._final)


def read_runs(reader: FileSystemReader, index: Metadata, runs: Mapping[str, Run]) -> None:
    """Reads the elements of these runs of tensors, by name, in any part of the checkpoint."""
    planner, items = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), list[ReadItem]()
    planner.set_up_planner({name: run.elements for name, run in runs.items()}, index)
    for name, run in runs.items():
        stored = cast(TensorStorageMetadata, index.state_dict_metadata[name])
        found = create_read_items_for_chunk_list(name, stored, [_chunk(run.start, run.elements.numel())])
        # By its name alone, because the memory has no elements before the run.
        items += (dataclasses.replace(item, dest_index=MetadataIndex(name)) for item in found)
    reader.read_data(LoadPlan(items), planner)


def _item(name: str, run: Run) -> WriteItem:
    chunk = _chunk(run.start, run.elements.numel())
    data = TensorWriteData(chunk, TensorProperties(dtype=run.elements.dtype), chunk.sizes)
    return WriteItem(MetadataIndex(name, [run.start]), WriteItemType.SHARD, tensor_data=data)


def _chunk(start: int, numel: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([numel]))
