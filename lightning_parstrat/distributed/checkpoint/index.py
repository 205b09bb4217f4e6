"""Where the elements of each tensor of a sharded checkpoint lie, by the layout of the buckets.

Each rank's file is one piece after the other; which they are, and where, follows from how the tensors are cut. So the
index has an entry for each tensor, and none for each rank, and it is computed, not gathered.
"""

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lightning_parstrat.distributed.checkpoint.zipped import zipped_bytes
from lightning_parstrat.distributed.torch_compat import checkpoint_metadata

_ALIGNMENT = 64
"""Bytes: pieces begin at multiples of it."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, 1-D in storage order.

    Attributes:
        name: Unique in the checkpoint.
        dtype: Of its elements.
        numel: How many there are.
        cut: Position among the index' cuts.
        offset: Where its first element lies in what is cut.
    """

    name: str
    dtype: torch.dtype
    numel: int
    cut: int
    offset: int


class StoredPiece(NamedTuple):
    """A run of a tensor's elements in one rank's file.

    Attributes:
        name: The tensor's.
        dtype: Of its elements.
        start: Position of the first element.
        numel: How many.
        file: Name of the file.
        position: Where in it the piece begins, in bytes; it is a tensor as ``torch.save`` would write it.
        length: Bytes of the piece.
    """

    name: str
    dtype: torch.dtype
    start: int
    numel: int
    file: str
    position: int
    length: int


class CheckpointIndex:
    """What is in a sharded checkpoint.

    Args:
        tensors: All of them.
        cuts: How buckets and replicated tensors are cut: shard i has the elements ``[bounds[i], bounds[i + 1])``.
        ranks: The ranks that write, in the order of the shards.
    """

    def __init__(self, tensors: Sequence[StoredTensor], cuts: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.ranks = ranks
        self._cuts = cuts
        self._by_cut: list[list[StoredTensor]] = [[] for _ in cuts]
        for tensor in tensors:
            if tensor.numel:
                self._by_cut[tensor.cut].append(tensor)
        for together in self._by_cut:
            together.sort(key=lambda tensor: tensor.offset)
        self._starts = [[tensor.offset for tensor in together] for together in self._by_cut]
        self._known: dict[int, dict[str, StoredPiece]] = {}

    def __reduce__(self) -> Any:
        # What torch's own reader loads is an index of torch's, made when it is loaded.
        cuts = [cut if isinstance(cut, range) else _Steps.of(cut) for cut in self._cuts]
        return torch_metadata, (FORMAT, list(map(tuple, self.tensors.values())), cuts, self.ranks)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def numel(self, name: str) -> int:
        """How many elements a tensor has."""
        return self.tensors[name].numel

    def pieces_between(self, name: str, start: int, stop: int) -> list[StoredPiece]:
        """The pieces with elements of ``[start, stop)`` of a tensor, in order."""
        tensor = self.tensors[name]
        if start >= stop:
            return []
        bounds = self._cuts[tensor.cut]
        first = bisect_right(bounds, tensor.offset + start) - 1
        last = bisect_right(bounds, tensor.offset + stop - 1) - 1
        return [piece for shard in range(first, last + 1) if (piece := self.in_shard(shard).get(name)) is not None]

    def in_shard(self, shard: int) -> dict[str, StoredPiece]:
        """The pieces in one file, in their order, by the names of the tensors."""
        if shard not in self._known:
            self._known[shard] = {piece.name: piece for piece in self._placed(shard)}
        return self._known[shard]

    def file_sizes(self) -> dict[str, int]:
        """All files, and how many bytes each has at least."""
        ends = ((shard, list(self.in_shard(shard).values())[-1:]) for shard in range(len(self.ranks)))
        return {piece.file: piece.position + piece.length for _, last in ends for piece in last}

    def file_of(self, shard: int) -> str:
        """The file that a shard's owner writes, if it has anything to write."""
        return f"__{self.ranks[shard]}_0.distcp"

    def _placed(self, shard: int) -> Iterator[StoredPiece]:
        position, file = 0, self.file_of(shard)
        for tensor, start, numel in self._cut_to(shard):
            length = zipped_bytes(numel * tensor.dtype.itemsize)
            yield StoredPiece(tensor.name, tensor.dtype, start, numel, file, position, length)
            position += -(-length // _ALIGNMENT) * _ALIGNMENT

    def _cut_to(self, shard: int) -> Iterator[tuple[StoredTensor, int, int]]:
        for bounds, together, starts in zip(self._cuts, self._by_cut, self._starts, strict=True):
            first, stop = bounds[shard], bounds[shard + 1]
            # Tensors that begin together are as long; several lie where one parameter does.
            begin = bisect_left(starts, starts[max(bisect_right(starts, first) - 1, 0)]) if starts else 0
            for tensor in together[begin:]:
                if tensor.offset >= stop:
                    break
                start = max(first - tensor.offset, 0)
                numel = min(stop - tensor.offset, tensor.numel) - start
                if numel > 0:
                    yield tensor, start, numel


class _Steps(NamedTuple):
    """Bounds of which few differ from the one before, without the others: one parameter has one owner.

    Attributes:
        number: How many bounds there are.
        after: Those that are larger than the one before, by position; the first is always here.
    """

    number: int
    after: list[tuple[int, int]]

    @classmethod
    def of(cls, bounds: Sequence[int]) -> "_Steps":
        larger = [(n, bound) for n, bound in enumerate(bounds) if n == 0 or bound != bounds[n - 1]]
        return cls(len(bounds), larger)

    def bounds(self) -> tuple[int, ...]:
        found: list[int] = []
        for (_, bound), stop in zip(self.after, [*(n for n, _ in self.after[1:]), self.number], strict=True):
            found += [bound] * (stop - len(found))
        return tuple(found)


FORMAT = 1
"""Of the index."""


def torch_metadata(version: int, tensors: list[Any], cuts: list[Any], ranks: Sequence[int]) -> Any:
    """What a pickled :class:`CheckpointIndex` becomes elsewhere: torch's ``Metadata``, with an entry for each piece."""
    index = _index(version, tensors, cuts, ranks)
    pieces = {
        name: (tensor.dtype, tensor.numel, index.pieces_between(name, 0, tensor.numel))
        for name, tensor in index.tensors.items()
    }
    return checkpoint_metadata(pieces)


def _index(version: int, tensors: list[Any], cuts: list[Any], ranks: Sequence[int]) -> CheckpointIndex:
    if version > FORMAT:
        raise ValueError(f"It was saved by a newer lightning-parstrat: its format is {version}, not {FORMAT}.")
    bounds = [cut.bounds() if isinstance(cut, _Steps) else cut for cut in cuts]
    return CheckpointIndex([StoredTensor(*tensor) for tensor in tensors], bounds, ranks)


class IndexUnpickler(pickle.Unpickler):
    """Loads an index as it was, not as torch's reader would have it; torch's own stay what they are."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of that name."""
        asked = module, name
        return _index if asked == (torch_metadata.__module__, torch_metadata.__name__) else super().find_class(*asked)
