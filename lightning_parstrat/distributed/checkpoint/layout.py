"""Which rank writes which part of each tensor, and at which place in its file. All ranks know it from the cuts."""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parstrat.core.layout import parts_of


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint, 1-D in storage order.

    Attributes:
        name: Unique in the checkpoint.
        dtype: The dtype of its elements.
        numel: The number of elements.
        offset: The position of its first element in what is cut.
        bounds: Part i of what is cut has the elements ``[bounds[i], bounds[i + 1])``.
    """

    name: str
    dtype: torch.dtype
    numel: int
    offset: int
    bounds: Sequence[int]


class Piece(NamedTuple):
    """The elements of a tensor that one rank writes: ``numel`` of them, from ``start`` on."""

    tensor: SavedTensor
    start: int
    numel: int

    @property
    def saved_bytes(self) -> int:
        """How many bytes it takes in a file."""
        return saved_bytes(self.tensor.dtype, self.numel)


class Run(NamedTuple):
    """A run of a tensor's elements in storage order, and the memory to read it into: 1-D, on the host."""

    target: Tensor
    start: int


class CheckpointLayout:
    """The pieces that each rank writes, in this order.

    Args:
        tensors: All tensors.
        writers: The rank that writes part i of what is cut.
    """

    def __init__(self, tensors: Sequence[SavedTensor], writers: Sequence[int]) -> None:
        # By size: torch uses this order for copies from a GPU.
        self.tensors = sorted(tensors, key=lambda tensor: tensor.numel * tensor.dtype.itemsize)
        self._writers = writers

    def of_rank(self, rank: int) -> list[Piece]:
        """The pieces that a rank writes, in their order."""
        part = self._writers.index(rank)
        pieces = []
        for tensor in self.tensors:
            if tensor.numel:
                start = max(tensor.bounds[part] - tensor.offset, 0)
                stop = min(tensor.bounds[part + 1] - tensor.offset, tensor.numel)
                pieces += [Piece(tensor, start, stop - start)] if stop > start else []
        return pieces

    def placed(self, begins: Sequence[int]) -> Iterator[tuple[int, Piece, int]]:
        """The rank, the piece, and the piece's position in the rank's file, in bytes.

        Args:
            begins: The position of the first piece in each rank's file.
        """
        ends = list(begins)
        for tensor in self.tensors:
            for part in parts_of(tensor.bounds, tensor.offset, tensor.offset + tensor.numel):
                rank, piece = self._writers[part.shard], Piece(tensor, part.start - tensor.offset, part.numel)
                yield rank, piece, ends[rank]
                ends[rank] += piece.saved_bytes


def split_bounds(bounds: Sequence[int], copies: int) -> Sequence[int]:
    """The bounds of parts, of which ``copies`` make a shard: one for each rank that holds a copy of it."""
    if copies == 1:
        return bounds
    starts = [(start, stop) for start, stop in pairwise(bounds) for _ in range(copies)]
    parts = [start + (stop - start) * (number % copies) // copies for number, (start, stop) in enumerate(starts)]
    return [*parts, bounds[-1]]


@functools.lru_cache(2**16)
def saved_bytes(dtype: torch.dtype, numel: int) -> int:
    """How many bytes ``torch.save`` writes of a 1-D tensor. The number does not depend on the elements."""
    # A file with a hole: neither memory nor the disk is touched for the elements.
    with tempfile.TemporaryFile() as file, torch.serialization.skip_data():
        torch.save(torch.empty(numel, dtype=dtype), file)
        return file.tell()
