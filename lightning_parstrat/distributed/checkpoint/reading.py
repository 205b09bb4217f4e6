"""Reads a checkpoint that all ranks have written together, at any world size. Not collective."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.folder import METADATA, SKELETON, CheckpointDamagedError
from lightning_parstrat.distributed.durable_files import recover
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded, sharding_of
from lightning_parstrat.distributed.zero1.state_dict import OwnPart, StateDict
from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS


class Run(NamedTuple):
    """A run of a tensor's elements in storage order, and the memory to read it into."""

    target: Tensor
    start: int


class ShardedCheckpoint:
    """A folder that :func:`save_sharded` has written.

    Args:
        folder: Checked at once for missing and truncated files, by their sizes alone.
        weights_only: Whether what is unpickled may be tensors and plain values only, as in ``torch.load``. (The index
            of the folder is torch's, which knows no such restriction.)

    Raises:
        CheckpointDamagedError: Files are missing or too short; the message names them.

    Attributes:
        skeleton: The checkpoint with tensors on the meta device where :meth:`read` finds their elements.
    """

    def __init__(self, folder: Path, weights_only: bool | None = None) -> None:
        recover(folder)
        self.folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._checked_metadata()
        self.skeleton: Any = self._loaded_skeleton(weights_only)
        self._names: dict[int, str] = {}
        for leaf in leaves(self.skeleton):
            if leaf.tensor.device.type == "meta" and leaf.name in self._metadata.state_dict_metadata:
                # The first name of a tied tensor: it was written under that one, see `sources_in`.
                self._names.setdefault(id(leaf.tensor), leaf.name)

    def name_of(self, tensor: Tensor) -> str | None:
        """The name under which a skeleton's tensor was written; None where the skeleton holds its elements."""
        return self._names.get(id(tensor))

    def pieces_of(self, name: str) -> list[tuple[int, int]]:
        """First position and length of each piece of a tensor, as they were written."""
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointDamagedError(f"{name} is not a tensor in the checkpoint {self.folder}. {_REMEDY}")
        return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks)

    def read(self, wanted: Mapping[str, Run]) -> None:
        """Reads runs of tensors into memory. Peak: one piece that a rank has written, beside the targets.

        Args:
            wanted: By name; targets are 1-D, in host memory or on a device.
        """
        planner = _RunPlanner(wanted)
        planner.set_up_planner({name: run.target for name, run in wanted.items()}, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointDamagedError(
                f"The elements of {', '.join(list(wanted)[:3])} or of others cannot be read from {self.folder}"
                f" ({error}). {_REMEDY}"
            ) from error

    def filled(self, tree: Any) -> Any:
        """A copy of a part of the skeleton with all tensors uncut, in host memory."""
        new: dict[int, Tensor] = {}
        for leaf in leaves(tree):
            if self.name_of(leaf.tensor) is not None and id(leaf.tensor) not in new:
                meta = leaf.tensor
                new[id(meta)] = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        self.read({self._names[key]: Run(_flat(tensor), 0) for key, tensor in new.items()})
        return replace_leaves(tree, lambda tensor: new.get(id(tensor), tensor))

    def own_parts(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """A state dict of the skeleton with this rank's parts where the optimizer shards, otherwise with uncut tensors.

        Args:
            optimizer: The optimizer that will load it.
            state_dict: From the skeleton.

        Raises:
            ValueError: A tensor has another shape than the parameter it belongs to.
        """
        slots: Mapping[Tensor, ParameterSlot] = sharding_of(optimizer).slots if is_sharded(optimizer) else {}
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        identifiers = (identifier for group in state_dict["param_groups"] for identifier in group["params"])
        placed = {i: slots[p] for i, p in zip(identifiers, parameters, strict=False) if p in slots}
        new: dict[str, StateDict] = {"state": {}, MASTER_WEIGHTS: {}}
        runs: dict[str, Run] = {}
        for identifier, entries in state_dict["state"].items():
            slot = placed.get(identifier)
            new["state"][identifier] = self._parts(entries, slot, runs) if slot is not None else self.filled(entries)
        for identifier, master in state_dict.get(MASTER_WEIGHTS, {}).items():
            slot = placed.get(identifier)
            new[MASTER_WEIGHTS].update(self._parts({identifier: master}, slot, runs) if slot is not None else {})
        self.read(runs)
        return {**state_dict, **{key: value for key, value in new.items() if value or key == "state"}}

    def _parts(self, entries: StateDict, slot: ParameterSlot, runs: dict[str, Run]) -> StateDict:
        """Replaces the tensors of one parameter's state by what will be read of them."""
        parts: StateDict = {}
        for key, value in entries.items():
            name = self.name_of(value) if isinstance(value, Tensor) else None
            if name is None:
                parts[key] = value
            elif value.shape == slot.parameter.shape and value.stride() == slot.strides:
                if slot.shard_slice is not None:
                    target = torch.empty(slot.shard_slice.numel, dtype=value.dtype)
                    runs[name] = Run(target, slot.shard_slice.parameter_start)
                    parts[key] = OwnPart(target)
            else:
                # Other strides or shape: a run of it is no shard slice. The optimizer cuts it when it loads it.
                parts[key] = self.filled(value)
        return parts

    def _checked_metadata(self) -> Metadata:
        missing = [name for name in (METADATA, SKELETON) if not (self.folder / name).exists()]
        self._refuse(missing, "missing")
        try:
            metadata = self._reader.read_metadata()
        except (EOFError, UnpicklingError, AttributeError, ImportError, IndexError) as error:
            raise CheckpointDamagedError(f"{self.folder / METADATA} is damaged ({error!r}). {_REMEDY}") from error
        # Copies are usually cut short. The index tells how long each file must be, and sizes are checked without
        # reading.
        sizes: dict[str, int] = {}
        for stored in metadata.storage_data.values():
            sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
        self._refuse([name for name in sizes if not (self.folder / name).exists()], "missing")
        short = [name for name, size in sizes.items() if (self.folder / name).stat().st_size < size]
        self._refuse(short, "shorter than when written")
        return metadata

    def _loaded_skeleton(self, weights_only: bool | None) -> Any:
        path = self.folder / SKELETON
        # A zip's directory is at its end: without it the file was cut short.
        if not zipfile.is_zipfile(path):
            raise CheckpointDamagedError(f"{path} is damaged: it ends too early. {_REMEDY}")
        try:
            return torch.load(path, map_location="cpu", weights_only=weights_only)
        except (RuntimeError, EOFError, KeyError) as error:
            raise CheckpointDamagedError(f"{path} is damaged ({error}). {_REMEDY}") from error

    def _refuse(self, names: Iterable[str], what: str) -> None:
        names = sorted(names)
        if names:
            others = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise CheckpointDamagedError(
                f"The checkpoint {self.folder} is incomplete: {', '.join(names[:8])}{others}"
                f" {'is' if len(names) == 1 else 'are'} {what}. Each rank writes a file `__<rank>_0.distcp`. {_REMEDY}"
            )


_REMEDY = "Copy the entire folder again from where it was written, or resume from another checkpoint."


class _RunPlanner(DefaultLoadPlanner):
    """Finds the written pieces that hold the wanted elements."""

    def __init__(self, wanted: Mapping[str, Run]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = wanted

    @override
    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise AssertionError("a plan was asked for before the planner was set up")
        items: list[ReadItem] = []
        for name, run in self._wanted.items():
            stored = self.metadata.state_dict_metadata[name]
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointDamagedError(f"{name} is not a tensor in the checkpoint. {_REMEDY}")
            chunk = ChunkStorageMetadata(offsets=torch.Size([run.start]), sizes=run.target.shape)
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        start, length = read_item.dest_offsets[0], read_item.lengths[0]
        return self._wanted[read_item.dest_index.fqn].target[start : start + length]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: torch has read straight into the target, see ``resolve_tensor``."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
