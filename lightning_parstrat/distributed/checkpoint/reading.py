"""Reads a checkpoint that all ranks have written together, at any world size."""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.core.tensor_trees import Leaf, leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.folder import (
    METADATA,
    OF_ANOTHER_JOB,
    SKELETON,
    CheckpointDamagedError,
    states_of,
)
from lightning_parstrat.distributed.checkpoint.pieces import Run, source_of
from lightning_parstrat.distributed.durable_files import recover
from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS, OwnPart, StateDict, grouped_parameters

_REMEDY = "Copy the entire folder again from its origin, or resume from another checkpoint."


class ShardedCheckpoint:
    """A folder that :func:`save_sharded` has written.

    Args:
        folder: The folder.
        weights_only: Whether unpickling allows only tensors and plain values, as in ``torch.load``. (The index of
            the folder is torch's, and has no such restriction.)
        group: The group of ranks, if ranks read together, all by the same calls. Content that all of them need is
            read by one rank and sent to the others. It works on host memory.

    Raises:
        CheckpointDamagedError: Files are missing or too short. The message names them. If ranks read together, each
            checks the sizes of some files, and knows only of those.

    Attributes:
        skeleton: The checkpoint with placeholders for the tensors whose elements :meth:`read` finds.
    """

    def __init__(self, folder: Path, weights_only: bool | None = None, group: dist.ProcessGroup | None = None) -> None:
        # Here, as it takes long to import.
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        recover(folder)
        self.folder = folder
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._rank, self._ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._weights_only = weights_only
        self._reader = FileSystemReader(folder)
        self._metadata = self._checked_index()
        self.skeleton: Any = self._object(SKELETON)

    def own_of(self, rank: int) -> Any:
        """The state that a rank alone needs to resume, see :func:`save_sharded`. Not collective.

        Args:
            rank: One of the ranks that have written the checkpoint.

        Raises:
            CheckpointDamagedError: The state cannot be read, or there is none.
        """
        return self._object(states_of(rank))

    def read(self, wanted: Mapping[str, Run | None]) -> dict[str, io.BytesIO]:
        """Reads runs of tensors into memory: only these, in any part of the checkpoint. Not collective.

        Args:
            wanted: Runs by the names under which they were written. For content that is no tensor, None.

        Returns:
            The content that is no tensor, by name.

        Raises:
            CheckpointDamagedError: The content cannot be read.
        """
        from lightning_parstrat.distributed.checkpoint.dcp import RunsPlanner

        planner = RunsPlanner(self._metadata, wanted)
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            self._check_unchanged()
            raise CheckpointDamagedError(
                f"{', '.join(list(wanted)[:3])} or others cannot be read from {self.folder} ({error}). {_REMEDY}"
            ) from error
        # Files are opened as they are read. Some could be those of another checkpoint.
        self._check_unchanged()
        return planner.content

    def _object(self, name: str) -> Any:
        content = self.read({name: None})[name]
        try:
            # A zip's directory is at its end.
            if content.read(4) != b"PK\3\4" or not zipfile.is_zipfile(content):
                raise EOFError("it does not begin or end as a file of torch.save")
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=self._weights_only)
        except (RuntimeError, EOFError, KeyError) as error:
            raise CheckpointDamagedError(f"{name!r} in {self.folder} is damaged ({error}). {_REMEDY}") from error

    def filled(
        self,
        tree: Any,
        cut_of: Callable[[tuple[Any, ...]], Cut | None] = lambda _: None,
        room: Callable[[Tensor], Tensor] = lambda like: torch.empty_like(like, device="cpu"),
    ) -> Any:
        """A copy of a part of the skeleton with its tensors, in host memory.

        If ranks read together, it is collective: each uncut tensor is read by one rank, which broadcasts it. Each rank
        reads its own part of cut tensors.

        Args:
            tree: The part of the skeleton.
            cut_of: How a tensor is cut, by its place in the tree. If a rank has no part of a tensor, the placeholder
                stays.
            room: Makes the memory for the tensor behind a placeholder, of its shape and strides.
        """
        uncut: dict[str, Tensor] = {}
        runs: dict[str, Run] = {}

        def replacement(leaf: Leaf) -> Any:
            source, cut = source_of(leaf.tensor), cut_of(leaf.path)
            if source is None:
                return leaf.tensor
            # With other strides or another shape, a run is no shard slice. The optimizer cuts it when it loads it.
            if cut is None or (leaf.tensor.shape, leaf.tensor.stride()) != (cut.shape, tuple(cut.strides)):
                if source.name not in uncut:
                    uncut[source.name] = room(leaf.tensor)
                return uncut[source.name]
            if cut.own is None:
                return leaf.tensor
            if source.name not in runs:
                part = torch.empty(cut.own.stop - cut.own.start, dtype=leaf.tensor.dtype)
                runs[source.name] = Run(part, cut.own.start)
            return OwnPart(runs[source.name].target)

        # By place, not by identity: one tensor may be in several places, of which one is cut.
        new = iter([replacement(leaf) for leaf in leaves(tree)])
        self._read_uncut(uncut)
        self.read(runs)
        return replace_leaves(tree, lambda _: next(new))

    def own_parts(self, optimizer: Optimizer, state_dict: StateDict, cuts: Mapping[Tensor, Cut]) -> StateDict:
        """An optimizer's state from the skeleton with this rank's parts, see :meth:`filled`.

        Args:
            optimizer: The optimizer that will load the state.
            state_dict: The optimizer's state in the skeleton.
            cuts: How the state of its parameters is cut.
        """
        identifiers = (identifier for group in state_dict["param_groups"] for identifier in group["params"])
        placed = {i: cuts[p] for i, p in zip(identifiers, grouped_parameters(optimizer), strict=False) if p in cuts}
        if MASTER_WEIGHTS in state_dict:
            masters = {i: master for i, master in state_dict[MASTER_WEIGHTS].items() if i in placed}
            state_dict = {**state_dict, MASTER_WEIGHTS: masters}

        def cut_of(path: tuple[Any, ...]) -> Cut | None:
            return placed.get(path[1]) if path[0] in ("state", MASTER_WEIGHTS) else None

        filled: StateDict = self.filled(state_dict, cut_of)
        return filled

    def _read_uncut(self, tensors: Mapping[str, Tensor]) -> None:
        runs = {name: Run(tensor.as_strided((tensor.numel(),), (1,)), 0) for name, tensor in tensors.items()}
        if self._group is None:
            self.read(runs)
            return
        # By size, and in turns: each rank reads about as much.
        names = sorted((name for name in runs if tensors[name].numel()), key=lambda name: -tensors[name].nbytes)
        failure: CheckpointDamagedError | None = None
        try:
            self.read({name: runs[name] for name in names[self._rank :: self._ranks]})
        except CheckpointDamagedError as error:
            # The others wait for the elements, so send them even after an error.
            failure = error
        for number, name in enumerate(names):
            # As bytes: Gloo does not send every dtype.
            dist.broadcast(runs[name].target.view(torch.uint8), group=self._group, group_src=number % self._ranks)
        if failure is not None:
            raise failure

    def _checked_index(self) -> Any:
        self._opened = self._identity()
        self._refuse([METADATA] if self._opened is None else [])
        try:
            metadata = self._reader.read_metadata()
            known = metadata.state_dict_metadata
        except (EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError) as error:
            raise CheckpointDamagedError(f"{self.folder / METADATA} is damaged ({error!r}). {_REMEDY}") from error
        if SKELETON not in known:
            raise CheckpointDamagedError(
                f"{self.folder / METADATA} is not the index of a sharded checkpoint of lightning-parstrat. {_REMEDY}"
            )
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._check_sizes()
        return metadata

    def _check_sizes(self) -> None:
        """Checks the sizes of files without reading them, each file on one rank. Copies are usually cut short."""
        sizes: dict[str, int] = {}
        for place in self._reader.storage_data.values():
            sizes[place.relative_path] = max(place.offset + place.length, sizes.get(place.relative_path, 0))
        there = {name: self.folder / name for name in sorted(sizes)[self._rank :: self._ranks]}
        self._refuse([n for n, path in there.items() if not path.exists() or path.stat().st_size < sizes[n]])

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = (self.folder / METADATA).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._identity() != self._opened:
            raise CheckpointDamagedError(
                f"{self.folder} was replaced or removed while it was being read: {OF_ANOTHER_JOB}"
            )

    def _refuse(self, names: Sequence[str]) -> None:
        if names:
            others = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise CheckpointDamagedError(
                f"The checkpoint {self.folder} is incomplete: {', '.join(names[:8])}{others}"
                f" {'is' if len(names) == 1 else 'are'} missing or shorter than when written. Each rank writes a file"
                f" `__<rank>_0.distcp`. {_REMEDY}"
            )
