"""Reads a checkpoint that all ranks have written together, at any world size."""

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import Leaf, in_storage_order, leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.folder import METADATA, OF_ANOTHER_JOB, SKELETON, CheckpointDamagedError
from lightning_parstrat.distributed.checkpoint.tensors import name_of, refuse_changed
from lightning_parstrat.distributed.durable_files import identity
from lightning_parstrat.distributed.engine.cuts import Cut, Run
from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS, StateDict, grouped_parameters


class ShardedCheckpoint:
    """A folder that :func:`save_sharded` has written.

    Args:
        folder: The folder.
        weights_only: Whether unpickling allows only tensors and plain values, as in ``torch.load``. (The index of
            the folder is torch's, and has no such restriction.)

    Raises:
        CheckpointDamagedError: The index or the checkpoint's form is missing or damaged.

    Attributes:
        skeleton: The checkpoint with placeholders for the tensors whose elements are in the files.
    """

    def __init__(self, folder: Path, weights_only: bool | None = None) -> None:
        # Here, as it takes long to import.
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.folder, self._weights_only = folder, weights_only
        self._opened = identity(folder / METADATA)
        self._reader = FileSystemReader(folder)
        with self._damages(f"its index, {METADATA},"):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self.skeleton: Any = self._loaded_skeleton()

    def _read(self, runs: Mapping[str, Run]) -> None:
        from lightning_parstrat.distributed.checkpoint.dcp import read_runs

        with self._damages(" or ".join(list(runs)[:3])):
            read_runs(self._reader, self._metadata, runs)

    @contextmanager
    def _damages(self, what: str) -> Iterator[None]:
        """Within it, all errors are those of a damaged checkpoint."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        # Files are opened as they are read. Some could be those of another checkpoint.
        if identity(self.folder / METADATA) != self._opened:
            raise CheckpointDamagedError(
                f"{self.folder} was replaced or removed while it was being read: {OF_ANOTHER_JOB}"
            ) from failure
        if failure is not None:
            raise CheckpointDamagedError(
                f"{self.folder} is damaged or incomplete: {what} cannot be read ({type(failure).__name__}: {failure})."
                " Each rank writes a file `__<rank>_0.distcp`. Copy the entire folder again from its origin,"
                " or resume from another checkpoint."
            ) from failure

    def check_files(self) -> None:
        """Looks for the files of all ranks. Not for a training: each of many ranks would look for many files.

        Raises:
            CheckpointDamagedError: One is missing, or too short.
        """
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            with self._damages(name):
                if (self.folder / name).stat().st_size < end:
                    raise EOFError(f"it has less than {end} bytes")

    def _loaded_skeleton(self) -> Any:
        path = self.folder / SKELETON
        with self._damages(SKELETON):
            # A zip's directory is at its end.
            if not zipfile.is_zipfile(path):
                raise EOFError("it is missing, or does not end as a file of torch.save")
            try:
                return torch.load(path, map_location="cpu", weights_only=self._weights_only)
            except pickle.UnpicklingError as error:
                refused = error
        raise refused

    def filled(
        self,
        tree: Any,
        cut_of: Callable[[tuple[Any, ...]], Cut | None] = lambda _: None,
        room: Callable[[Tensor], Tensor] = lambda like: torch.empty_like(like, device="cpu"),
    ) -> Any:
        """A copy of a part of the skeleton with its tensors, in host memory. Of cut tensors, with this rank's part.

        Args:
            tree: The part of the skeleton.
            cut_of: How a tensor is cut, by its place in the tree.
            room: Makes the memory for the tensor behind a placeholder, of its shape and strides.
        """
        whole: dict[str, Tensor] = {}
        runs: dict[str, Run] = {}

        def replacement(leaf: Leaf) -> Any:
            name, cut = name_of(leaf.tensor), cut_of(leaf.path)
            if name is None:
                return leaf.tensor
            # With other strides or another shape, a run is no shard slice. The optimizer cuts it when it loads it.
            if cut is None or (leaf.tensor.shape, leaf.tensor.stride()) != (cut.shape, cut.strides):
                if name not in whole:
                    whole[name] = room(leaf.tensor)
                return whole[name]
            if name not in runs:
                part = torch.empty(cut.own.stop - cut.own.start, dtype=leaf.tensor.dtype)
                runs[name] = Run(cut.own.start, part)
            return runs[name]

        # By place, not by identity: one tensor may be in several places, of which one is cut.
        new = iter([replacement(leaf) for leaf in leaves(tree)])
        self._read({name: Run(0, in_storage_order(tensor)) for name, tensor in whole.items()})
        self._read(runs)
        return replace_leaves(tree, lambda _: next(new))

    def own_parts(self, optimizer: Optimizer, state_dict: StateDict, cuts: Mapping[Tensor, Cut]) -> StateDict:
        """An optimizer's state from the skeleton with this rank's parts, see :meth:`filled`.

        Args:
            optimizer: The optimizer that will load the state.
            state_dict: The optimizer's state in the skeleton.
            cuts: How the state of its parameters is cut.

        Raises:
            ValueError: A hook has changed a placeholder.
        """
        refuse_changed(
            state_dict,
            "In a sharded checkpoint, placeholders stand for the optimizers' tensors until each rank reads its part.",
            "make one file of the checkpoint by `lightning-parstrat consolidate` and load that",
        )
        identifiers = (identifier for group in state_dict["param_groups"] for identifier in group["params"])
        placed = {i: cuts[p] for i, p in zip(identifiers, grouped_parameters(optimizer), strict=False) if p in cuts}

        def cut_of(path: tuple[Any, ...]) -> Cut | None:
            return placed.get(path[1]) if path[0] in ("state", MASTER_WEIGHTS) else None

        return cast(StateDict, self.filled(state_dict, cut_of))
