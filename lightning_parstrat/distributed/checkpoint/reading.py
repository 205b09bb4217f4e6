"""Reads a checkpoint that all ranks have written together, at any world size."""

import copy
import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.cuts import Cut
from lightning_parstrat.distributed.checkpoint.folder import METADATA, OF_ANOTHER_JOB, SKELETON, CheckpointDamagedError
from lightning_parstrat.distributed.checkpoint.index import CheckpointIndex, IndexUnpickler, StoredPiece, file_of
from lightning_parstrat.distributed.checkpoint.zipped import elements_in
from lightning_parstrat.distributed.durable_files import recover
from lightning_parstrat.distributed.zero1.state import MASTER_WEIGHTS, OwnPart, StateDict, grouped_parameters


class Run(NamedTuple):
    """A run of a tensor's elements in storage order, and the memory to read it into."""

    target: Tensor
    start: int


class ShardedCheckpoint:
    """A folder that :func:`save_sharded` has written.

    Args:
        folder: The folder.
        weights_only: Whether what is unpickled may be tensors and plain values only, as in ``torch.load``. (The index
            of the folder is like torch's, which knows no such restriction.)
        group: Where ranks read it together: those that do, all of them by the same calls. What all of them need is then
            read by one of them and sent to the others. Works on host memory.

    Raises:
        CheckpointDamagedError: Files are missing or too short; the message names them. Where ranks read together, each
            looks at the sizes of some of the files, and knows of those alone.

    Attributes:
        skeleton: The checkpoint with tensors on the meta device where :meth:`read` finds their elements.
    """

    def __init__(self, folder: Path, weights_only: bool | None = None, group: dist.ProcessGroup | None = None) -> None:
        recover(folder)
        self.folder = folder
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._weights_only = weights_only
        self._index = self._checked_index()
        self.skeleton: Any = self._loaded_skeleton()
        self._check_unchanged()
        self._names: dict[int, str] = {}
        for leaf in leaves(self.skeleton):
            if leaf.tensor.device.type == "meta" and leaf.name in self._index:
                # The first name of a tied tensor: it was written under that one, see `sources_in`.
                self._names.setdefault(id(leaf.tensor), leaf.name)

    def name_of(self, tensor: Tensor) -> str | None:
        """The name under which a skeleton's tensor was written; None where the skeleton holds its elements."""
        return self._names.get(id(tensor))

    def pieces_of(self, name: str) -> list[tuple[int, int]]:
        """First position and length of each piece of a tensor, as they were written."""
        return [(one.start, one.numel) for one in self._index.pieces_between(name, 0, self._index.numel(name))]

    def own_of(self, rank: int) -> Any:
        """What a rank alone had to say, see :func:`save_sharded`. Not collective.

        Args:
            rank: One of those that have written it.

        Raises:
            CheckpointDamagedError: It cannot be read, or there is none.
        """
        path = self.folder / file_of(rank)
        self._check_unchanged()
        try:
            with open(path, "rb") as file:
                file.seek(self._index.end_of(rank))
                return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=self._weights_only)
        except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
            raise CheckpointDamagedError(
                f"What rank {rank} has noted for itself cannot be read from the end of {path} ({error}). {_REMEDY}"
            ) from error

    def read(self, wanted: Mapping[str, Run]) -> None:
        """Reads runs of tensors into memory: these alone, wherever they lie in what was written. Not collective.

        Args:
            wanted: By name; targets are 1-D, contiguous, in host memory.

        Raises:
            CheckpointDamagedError: They cannot be read.
        """
        parts = sorted((part for name, run in wanted.items() for part in self._parts_of(name, run)), key=_by_place)
        try:
            for file_name, in_file in groupby(parts, lambda part: part.piece.file):
                with open(self.folder / file_name, "rb", buffering=0) as file:
                    for part in in_file:
                        _read_part(file, part)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            self._check_unchanged()
            raise CheckpointDamagedError(
                f"The elements of {', '.join(list(wanted)[:3])} or of others cannot be read from {self.folder}"
                f" ({error}). {_REMEDY}"
            ) from error
        # Files are opened as they are read: some could be those of another checkpoint.
        self._check_unchanged()

    def _parts_of(self, name: str, run: Run) -> Iterator["_Part"]:
        stop = run.start + run.target.numel()
        for piece in self._index.pieces_between(name, run.start, stop):
            first, last = max(run.start, piece.start), min(stop, piece.start + piece.numel)
            yield _Part(piece, first - piece.start, run.target[first - run.start : last - run.start])

    def filled(self, tree: Any) -> Any:
        """A copy of a part of the skeleton with all tensors uncut, in host memory.

        Where ranks read together it is collective: the elements are read once, and broadcast in blocks of up to 64 MiB.
        """
        uncut: dict[str, Tensor] = {}
        tree = self._with_room(tree, uncut)
        self._read_uncut(uncut)
        return tree

    def _with_room(self, tree: Any, uncut: dict[str, Tensor]) -> Any:
        """A copy of a part of the skeleton with memory for its tensors, which is noted by their names."""

        def room(tensor: Tensor) -> Tensor:
            name = self.name_of(tensor)
            if name is None:
                return tensor
            if name not in uncut:
                uncut[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return uncut[name]

        return replace_leaves(tree, room)

    def _read_uncut(self, tensors: Mapping[str, Tensor]) -> None:
        runs = {name: Run(_flat(tensor), 0) for name, tensor in tensors.items()}
        if self._group is None:
            self.read(runs)
        else:
            _read_together(self, list(_blocks(runs)), self._group)

    def own_weights(self, state_dict: dict[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """A module's state of the skeleton with this rank's parts of what is cut; the rest stays as it is.

        Not collective: each reads its own parts, tied ones once.

        Args:
            state_dict: From the skeleton.
            cuts: How weights are cut, by their names.
        """
        found: dict[str, Any] = {}
        runs: dict[str, Run] = {}
        for name, value in state_dict.items():
            part = self._part(value, cuts.get(name), runs)
            found[name] = value if part is None else part
        self.read(runs)
        # It has more than its items: the versions of modules.
        own = copy.copy(state_dict)
        own.update(found)
        return own

    def own_parts(self, optimizer: Optimizer, state_dict: StateDict, cuts: Mapping[Tensor, Cut]) -> StateDict:
        """A state dict of the skeleton with this rank's parts of what is cut, otherwise with uncut tensors.

        Where ranks read together it is collective, see :meth:`filled`; of a shard each reads its own part.

        Args:
            optimizer: The optimizer that will load it.
            state_dict: From the skeleton.
            cuts: How the state of its parameters is cut.

        Raises:
            ValueError: A tensor has another shape than the parameter it belongs to.
        """
        identifiers = (identifier for group in state_dict["param_groups"] for identifier in group["params"])
        parameters = grouped_parameters(optimizer)
        placed = {i: cuts[p] for i, p in zip(identifiers, parameters, strict=False) if p in cuts}
        new: dict[str, StateDict] = {"state": {}, MASTER_WEIGHTS: {}}
        runs: dict[str, Run] = {}
        uncut: dict[str, Tensor] = {}
        for identifier, entries in state_dict["state"].items():
            new["state"][identifier] = self._parts(entries, placed.get(identifier), runs, uncut)
        for identifier, master in state_dict.get(MASTER_WEIGHTS, {}).items():
            cut = placed.get(identifier)
            new[MASTER_WEIGHTS].update(self._parts({identifier: master}, cut, runs, uncut) if cut is not None else {})
        self._read_uncut(uncut)
        self.read(runs)
        return {**state_dict, **{key: value for key, value in new.items() if value or key == "state"}}

    def _parts(self, entries: StateDict, cut: Cut | None, runs: dict[str, Run], uncut: dict[str, Tensor]) -> StateDict:
        """Replaces the tensors of one parameter's state by what will be read of them."""
        parts: StateDict = {}
        for key, value in entries.items():
            if cut is not None and cut.own is None and self._lies_like(value, cut):
                continue
            part = self._part(value, cut, runs)
            # Of other strides or shape a run is no shard slice. The optimizer cuts it when it loads it.
            parts[key] = self._with_room(value, uncut) if part is None else part
        return parts

    def _part(self, value: Any, cut: Cut | None, runs: dict[str, Run]) -> OwnPart | None:
        """What will be read of a tensor, by ``runs``; None where it is not cut, or cannot be read in parts."""
        if cut is None or cut.own is None or not self._lies_like(value, cut):
            return None
        name = str(self.name_of(value))
        if name not in runs:
            target = torch.empty(cut.own.stop - cut.own.start, dtype=value.dtype)
            runs[name] = Run(target, cut.own.start)
        return OwnPart(runs[name].target)

    def _lies_like(self, value: Any, cut: Cut) -> bool:
        """Whether a tensor is one of the files', whose elements lie as those of what is cut."""
        if not isinstance(value, Tensor) or self.name_of(value) is None:
            return False
        return value.shape == cut.shape and value.stride() == tuple(cut.strides)

    def _checked_index(self) -> CheckpointIndex:
        missing = [name for name in (METADATA, SKELETON) if not (self.folder / name).exists()]
        self._refuse(missing, "missing")
        self._opened = self._identity()
        try:
            with open(self.folder / METADATA, "rb") as file:
                index = IndexUnpickler(file).load()
        except (EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError) as error:
            raise CheckpointDamagedError(f"{self.folder / METADATA} is damaged ({error!r}). {_REMEDY}") from error
        if not isinstance(index, CheckpointIndex):
            raise CheckpointDamagedError(
                f"{self.folder / METADATA} holds a {type(index).__name__}, not the index of a sharded checkpoint of"
                f" lightning-parstrat. {_REMEDY}"
            )
        # Copies are usually cut short. The index tells how long each file must be, and sizes are checked without
        # reading; of each file by one rank.
        rank, size = (0, 1) if self._group is None else (dist.get_rank(self._group), dist.get_world_size(self._group))
        self._check_sizes(index.file_sizes(rank, size))
        return index

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

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        found = {name: _size(self.folder / name) for name in sizes}
        self._refuse([name for name, size in found.items() if size is None], "missing")
        short = [name for name, size in found.items() if size is not None and size < sizes[name]]
        self._refuse(short, "shorter than when written")

    def _loaded_skeleton(self) -> Any:
        path = self.folder / SKELETON
        # A zip's directory is at its end: without it the file was cut short.
        if not zipfile.is_zipfile(path):
            raise CheckpointDamagedError(f"{path} is damaged: it ends too early. {_REMEDY}")
        try:
            return torch.load(path, map_location="cpu", weights_only=self._weights_only)
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


class _Part(NamedTuple):
    """A run of elements of a piece, and the memory to read it into."""

    piece: StoredPiece
    start: int
    target: Tensor


def _by_place(part: _Part) -> tuple[str, int]:
    return part.piece.file, part.piece.position


def _read_part(file: Any, part: _Part) -> None:
    begin = elements_in(file, part.piece.position, part.piece.length)
    # As bytes: numpy has no bfloat16.
    room = part.target.view(torch.uint8).numpy().data
    file.seek(begin + part.start * part.target.itemsize)
    while room:
        read = file.readinto(room)
        if not read:
            raise EOFError("the file ends too early")
        room = room[read:]


_BLOCK_BYTES = (2**15, 2**26)
"""The least and the most that one rank reads for all at a time. Of less, latency is what a broadcast takes."""

_BLOCKS = 32
"""As many there are at least where that allows it: of a small model each lies in the files of all ranks that saved it,
and each of as many ranks opens some of them."""

_BLOCK_ALIGNMENT = 16
"""Bytes: of the widest dtype."""


class _InBlock(NamedTuple):
    """A run of a tensor in a block."""

    name: str
    target: Tensor
    start: int
    place: int


def _blocks(wanted: Mapping[str, Run]) -> Iterator[list[_InBlock]]:
    """Cuts runs into blocks that are read one by one: the same on all ranks that want the same."""
    block: list[_InBlock] = []
    end = 0
    least, most = _BLOCK_BYTES
    total = sum(run.target.nbytes for run in wanted.values())
    limit = min(max(-(-total // _BLOCKS), least), most)
    for name, run in wanted.items():
        done = 0
        while done < run.target.numel():
            place = -(-end // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
            numel = min((limit - place) // run.target.itemsize, run.target.numel() - done)
            if numel > 0:
                block.append(_InBlock(name, run.target[done : done + numel], run.start + done, place))
                end, done = place + numel * run.target.itemsize, done + numel
            if done < run.target.numel():
                yield block
                block, end = [], 0
    if block:
        yield block


def _read_together(checkpoint: ShardedCheckpoint, blocks: Sequence[list[_InBlock]], group: dist.ProcessGroup) -> None:
    """Fills the targets of all ranks: each block is read by one of them and broadcast. Collective.

    Raises:
        CheckpointDamagedError: What this rank was to read cannot be read; others do not know of it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    failure: Exception | None = None

    def read(number: int) -> Tensor | None:
        nonlocal failure
        if number >= len(blocks):
            return None
        buffer = _buffer_for(blocks[number])
        try:
            checkpoint.read({one.name: Run(_view(one, buffer), one.start) for one in blocks[number]})
        except Exception as error:
            # The others wait for the block, whatever is in it.
            failure = error
        return buffer

    # While others send theirs, each has read its next.
    ahead = read(rank)
    for number, block in enumerate(blocks):
        source = number % size
        buffer = ahead if source == rank and ahead is not None else _buffer_for(block)
        dist.broadcast(buffer, group=group, group_src=source)
        for one in block:
            one.target.copy_(_view(one, buffer))
        if source == rank:
            ahead = read(number + size)
    if failure is not None:
        raise failure


def _buffer_for(block: Sequence[_InBlock]) -> Tensor:
    return torch.empty(block[-1].place + block[-1].target.nbytes, dtype=torch.int8)


def _view(one: _InBlock, buffer: Tensor) -> Tensor:
    return buffer[one.place : one.place + one.target.nbytes].view(one.target.dtype)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
