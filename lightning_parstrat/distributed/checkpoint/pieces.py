"""Which tensors of a checkpoint all ranks write together, and which part of each a rank writes.

A tensor is described in terms that all ranks understand (:class:`TensorSource`). In rank 0's checkpoint, a placeholder
on the meta device replaces the tensor. It has shape, strides and dtype but no elements.
"""

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.core.layout import parts_of
from lightning_parstrat.core.tensor_trees import in_storage_order, replace_leaves
from lightning_parstrat.distributed.engine.state import grouped_parameters


class TensorSource(NamedTuple):
    """The identity of a tensor, the same on all ranks.

    Attributes:
        optimizer: Position of the optimizer whose state contains it. For a parameter, None.
        parameter: Position of the parameter in the optimizer, or its name.
        entry: Key in the parameter's state. For the parameter itself, empty.
    """

    optimizer: int | None
    parameter: int | str
    entry: Any = ""

    @property
    def name(self) -> str:
        """The name under which it is written."""
        if self.optimizer is None:
            return f"state_dict/{self.parameter}"
        return f"optimizer_states/{self.optimizer}/state/{self.parameter}/{self.entry}"


def placeholder(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, source: TensorSource) -> Tensor:
    """Replaces a tensor whose elements are written by the ranks that own them. It is pickled with its source."""
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    # Plain values, which `weights_only` allows.
    made.parstrat_source = tuple(source)  # type: ignore[attr-defined]
    return made


def source_of(tensor: Tensor) -> TensorSource | None:
    """The source of a placeholder. For an ordinary tensor, None."""
    source = getattr(tensor, "parstrat_source", None)
    return None if source is None else TensorSource(*source)


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint, 1-D in storage order.

    Attributes:
        source: Its identity.
        dtype: The dtype of its elements.
        numel: The number of elements.
        offset: The position of its first element in what is cut.
        bounds: Part i of what is cut has the elements ``[bounds[i], bounds[i + 1])``.
    """

    source: TensorSource
    dtype: torch.dtype
    numel: int
    offset: int
    bounds: Sequence[int]


class Piece(NamedTuple):
    """The elements of a tensor that one rank writes: ``numel`` of them, from ``start`` on."""

    tensor: SavedTensor
    rank: int
    start: int
    numel: int


class Run(NamedTuple):
    """A run of a tensor's elements in storage order, and the memory to read it into: 1-D, on the host."""

    target: Tensor
    start: int


class CheckpointPieces:
    """Which pieces of the tensors of a training each rank writes, and this rank's.

    Sharded tensors are written by their owners. If groups of ranks hold a copy each, ranks with the same shard write
    equal parts of it. So all nodes write, and each element is there once. Replicated tensors are parameters that no
    optimizer shards, and state that every rank keeps. Each is written by one rank.

    Args:
        parameters: Parameters by name, for sources without an optimizer. The names are the same on all ranks.
        optimizers: Sources give positions in this sequence.
        cuts: How tensors are cut, by the position of the optimizer whose state they are. The key None is for parameters
            themselves. Tensors without an entry are whole on every rank.
        groups: For each copy of the sharded state, the ranks that together hold it, in the order of their shards.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
        cuts: Mapping[int | None, Mapping[Tensor, Cut]],
        groups: Sequence[Sequence[int]],
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._cuts = cuts
        self._copies = len(groups)
        self._writers = [rank for of_a_shard in zip(*groups, strict=True) for rank in of_a_shard]

    def with_placeholders(self, tree: Any) -> Any:
        """A copy of a tree in which placeholders replace parameters at every place."""
        # By memory, not by identity: a state dict holds detached views. Empty tensors have no memory by which to
        # separate them.
        names = {_memory(parameter): name for name, parameter in self._parameters.items() if parameter.numel()}
        issued: dict[str, Tensor] = {}

        def replacement(tensor: Tensor) -> Tensor:
            name = names.get(_memory(tensor)) if tensor.layout == torch.strided else None
            if name is None:
                return tensor
            if name not in issued:
                source = TensorSource(None, name)
                parameter, cut = self._find(source)
                strides = strides_in_storage(parameter) if cut is None else cut.strides
                issued[name] = placeholder(tensor.shape, strides, tensor.dtype, source)
            return issued[name]

        return replace_leaves(tree, replacement)

    def tensors(self, sources: Mapping[TensorSource, torch.dtype]) -> list[SavedTensor]:
        """How these tensors are divided among the ranks. Only their cuts decide."""
        bounds: dict[Hashable, Sequence[int]] = {}
        tensors = []
        for source, dtype in sources.items():
            parameter, cut = self._find(source)
            if cut is None:
                numel, ranks = self._whole(source, parameter).numel(), len(self._writers)
                # A checksum spreads tensors over the ranks.
                own = zlib.crc32(source.name.encode()) % ranks
                shares = range(-own * numel, (ranks - own) * numel + 1, max(numel, 1))
                tensors.append(SavedTensor(source, dtype, numel, 0, shares))
                continue
            if cut.key not in bounds:
                bounds[cut.key] = split_bounds(cut.bounds, self._copies)
            tensors.append(SavedTensor(source, dtype, cut.numel, cut.offset, bounds[cut.key]))
        return tensors

    def of_rank(self, tensors: Sequence[SavedTensor], rank: int | None = None) -> Iterator[Piece]:
        """The pieces that a rank writes, in their order. None for those of all ranks."""
        part = None if rank is None else self._writers.index(rank)
        for tensor in tensors:
            start, stop = tensor.offset, tensor.offset + tensor.numel
            if part is not None:
                start, stop = max(start, tensor.bounds[part]), min(stop, tensor.bounds[part + 1])
            for one in parts_of(tensor.bounds, start, stop):
                yield Piece(tensor, self._writers[one.shard], one.start - tensor.offset, one.numel)

    def part(self, piece: Piece) -> Tensor:
        """The elements of a tensor that this rank writes: 1-D, in storage order, a view if possible."""
        source, elements = piece.tensor.source, slice(piece.start, piece.start + piece.numel)
        parameter, cut = self._find(source)
        if cut is None:
            return in_storage_order(self._whole(source, parameter))[elements]
        if source.optimizer is None:
            return cut.of_parameter(elements)
        state = cut.of_state(self._optimizers[source.optimizer], source.entry, elements)
        # As before a first step: other ranks may keep an entry that this one does not.
        return torch.zeros((), dtype=piece.tensor.dtype).expand(piece.numel) if state is None else state

    def _find(self, source: TensorSource) -> tuple[Tensor, Cut | None]:
        if source.optimizer is None:
            parameter: Tensor = self._parameters[str(source.parameter)]
        else:
            parameter = grouped_parameters(self._optimizers[source.optimizer])[int(source.parameter)]
        return parameter, self._cuts[source.optimizer].get(parameter)

    def _whole(self, source: TensorSource, parameter: Tensor) -> Tensor:
        if source.optimizer is None:
            return parameter.detach()
        value: Tensor = self._optimizers[source.optimizer].state[parameter][source.entry]
        return value.detach()


def split_bounds(bounds: Sequence[int], copies: int) -> Sequence[int]:
    """The bounds of parts, of which ``copies`` make a shard: one for each rank that holds a copy of it."""
    if copies == 1:
        return bounds
    starts = [(start, stop) for start, stop in pairwise(bounds) for _ in range(copies)]
    parts = [start + (stop - start) * (number % copies) // copies for number, (start, stop) in enumerate(starts)]
    return [*parts, bounds[-1]]


def with_placeholders_for_state(state_dict: dict[str, Any], optimizer: Optimizer, position: int) -> dict[str, Any]:
    """A copy of a state dict, with placeholders for tensors of their parameter's shape.

    Args:
        state_dict: The state of ``optimizer``, in torch's own format. Its tensors are whole on every rank, or DTensors.
        optimizer: Its optimizer, which steps parameters, not shards in buckets.
        position: Position of the optimizer among those of the training.
    """
    parameters = grouped_parameters(optimizer)

    def stand_in(index: int, key: Any, value: Any) -> Any:
        if not _is_like(value, parameters[index]):
            return value
        return placeholder(value.shape, strides_in_storage(value), value.dtype, TensorSource(position, index, key))

    state = {
        index: {key: stand_in(index, key, value) for key, value in entries.items()}
        if isinstance(index, int)
        else entries
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def strides_in_storage(tensor: Tensor) -> Sequence[int]:
    """The strides of a tensor whose elements are :func:`in_storage_order` of ``tensor``."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _is_like(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return False
    return value.dim() > 0 and value.shape == parameter.shape and value.numel() > 0


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
