"""Where the elements of each tensor of a sharded checkpoint lie, by the layout of the buckets.

Each rank's file is one piece after the other; which they are, and where, follows from how the tensors are cut. So the
index has an entry for each tensor, and none for each rank, and it is computed, not gathered. Behind its pieces a rank's
file ends with what that rank alone has to say, of which the index knows where it begins.
"""

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

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


class SplitBounds(Sequence[int]):
    """Bounds of shards of which each is cut in equal parts: one for each of the ranks that hold a copy of it.

    Args:
        of_shards: Shard i has the elements ``[of_shards[i], of_shards[i + 1])``.
        copies: In how many parts each is cut.
    """

    def __init__(self, of_shards: Sequence[int], copies: int) -> None:
        self.of_shards, self.copies = of_shards, copies

    @override
    def __len__(self) -> int:
        return (len(self.of_shards) - 1) * self.copies + 1

    @override
    def __getitem__(self, number: int) -> int:  # type: ignore[override]
        shard, part = divmod(number, self.copies)
        start = self.of_shards[shard]
        return start + (self.of_shards[shard + 1] - start) * part // self.copies if part else start


class CheckpointIndex:
    """What is in a sharded checkpoint.

    Args:
        tensors: All of them.
        cuts: How buckets and replicated tensors are cut: part i has the elements ``[bounds[i], bounds[i + 1])``.
        groups: The ranks that write, of each copy of the shards in their order. With K copies, part i is that of the
            K-th part of a shard: rank ``groups[i % K][i // K]`` writes it.
    """

    def __init__(
        self, tensors: Sequence[StoredTensor], cuts: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
    ) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._groups = groups
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
        cuts = [
            (cut.copies, _packed(cut.of_shards)) if isinstance(cut, SplitBounds) else (1, _packed(cut))
            for cut in self._cuts
        ]
        return torch_metadata, (FORMAT, list(map(tuple, self.tensors.values())), cuts, self._groups)

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
        return [piece for part in range(first, last + 1) if (piece := self.in_part(part).get(name)) is not None]

    def in_part(self, part: int) -> dict[str, StoredPiece]:
        """The pieces in one file, in their order, by the names of the tensors."""
        if part not in self._known:
            self._known[part] = {piece.name: piece for piece in self._placed(part)}
        return self._known[part]

    def of_rank(self, rank: int) -> list[StoredPiece]:
        """The pieces that a rank writes, in their order."""
        copies = len(self._groups)
        parts = (group.index(rank) * copies + copy for copy, group in enumerate(self._groups) if rank in group)
        return [piece for part in parts for piece in self.in_part(part).values()]

    def end_of(self, rank: int) -> int:
        """Where in a rank's file that begins which it alone has to say, in bytes: behind its pieces."""
        return sum(_aligned(last.position + last.length) for last in self.of_rank(rank)[-1:])

    def file_sizes(self, first: int = 0, step: int = 1) -> Mapping[str, int]:
        """How many bytes a file has at least: of all files, or every ``step``-th one from the ``first`` on."""
        parts = range(first, len(self._groups) * len(self._groups[0]), step)
        ends = (list(self.in_part(part).values())[-1:] for part in parts)
        return {piece.file: piece.position + piece.length for last in ends for piece in last}

    def _placed(self, part: int) -> Iterator[StoredPiece]:
        shard, copy = divmod(part, len(self._groups))
        position, file = 0, file_of(self._groups[copy][shard])
        for tensor, start, numel in self._cut_to(part):
            length = zipped_bytes(numel * tensor.dtype.itemsize)
            yield StoredPiece(tensor.name, tensor.dtype, start, numel, file, position, length)
            position = _aligned(position + length)

    def _cut_to(self, part: int) -> Iterator[tuple[StoredTensor, int, int]]:
        for bounds, together, starts in zip(self._cuts, self._by_cut, self._starts, strict=True):
            first, stop = bounds[part], bounds[part + 1]
            # Tensors that begin together are as long; several lie where one parameter does.
            begin = bisect_left(starts, starts[max(bisect_right(starts, first) - 1, 0)]) if starts else 0
            for tensor in together[begin:]:
                if tensor.offset >= stop:
                    break
                start = max(first - tensor.offset, 0)
                numel = min(stop - tensor.offset, tensor.numel) - start
                if numel > 0:
                    yield tensor, start, numel


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"__{rank}_0.distcp"


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


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


def _packed(bounds: Sequence[int]) -> "range | _Steps":
    return bounds if isinstance(bounds, range) else _Steps.of(bounds)


def _unpacked(copies: int, packed: "range | _Steps") -> Sequence[int]:
    bounds = packed.bounds() if isinstance(packed, _Steps) else packed
    return bounds if copies == 1 else SplitBounds(bounds, copies)


FORMAT = 2
"""Of the index."""


def torch_metadata(version: int, tensors: list[Any], cuts: list[Any], groups: Sequence[Any]) -> Any:
    """What a pickled :class:`CheckpointIndex` becomes elsewhere: torch's ``Metadata``, with an entry for each piece."""
    index = _index(version, tensors, cuts, groups)
    pieces = {
        name: (tensor.dtype, tensor.numel, index.pieces_between(name, 0, tensor.numel))
        for name, tensor in index.tensors.items()
    }
    return checkpoint_metadata(pieces)


def _index(version: int, tensors: list[Any], cuts: list[Any], groups: Sequence[Any]) -> CheckpointIndex:
    if version != FORMAT:
        raise ValueError(f"It was saved by another lightning-parstrat: its format is {version}, not {FORMAT}.")
    bounds = [_unpacked(copies, packed) for copies, packed in cuts]
    return CheckpointIndex([StoredTensor(*tensor) for tensor in tensors], bounds, groups)


class IndexUnpickler(pickle.Unpickler):
    """Loads an index as it was, not as torch's reader would have it; torch's own stay what they are."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of that name."""
        asked = module, name
        return _index if asked == (torch_metadata.__module__, torch_metadata.__name__) else super().find_class(*asked)
