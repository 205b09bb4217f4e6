"""Which tensors of a checkpoint all ranks write together, and which part of each a rank writes.

A tensor is described in terms that all ranks understand (:class:`TensorSource`). In rank 0's checkpoint, a placeholder
on the meta device replaces the tensor. It has shape, strides and dtype but no elements.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.core.tensor_trees import in_storage_order, replace_leaves
from lightning_parstrat.distributed.checkpoint.layout import CheckpointLayout, Piece, SavedTensor, split_bounds
from lightning_parstrat.distributed.engine.state import grouped_parameters

_BYTES_WORTH_SPLITTING = 2**22


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


class CheckpointPieces:
    """Which pieces of the tensors of a training each rank writes, and this rank's.

    Sharded tensors are written by their owners. If groups of ranks hold a copy each, ranks with the same shard write
    equal parts of it. So all nodes write, and each element is there once. Replicated tensors are parameters that no
    optimizer shards, and state that every rank keeps. Large ones are split evenly, and each other one is written by one
    rank.

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

    def layout(self, sources: Mapping[TensorSource, torch.dtype]) -> CheckpointLayout:
        """Which rank writes which part of these tensors. Only their cuts decide."""
        bounds: dict[Any, Sequence[int]] = {}
        tensors = []
        for source, dtype in sources.items():
            parameter, cut = self._find(source)
            if cut is None:
                numel, offset = self._whole(source, parameter).numel(), 0
                shares: Sequence[int] = self._shares(source, numel, numel * dtype.itemsize)
            else:
                numel, offset = cut.numel, cut.offset
                if cut.key not in bounds:
                    bounds[cut.key] = split_bounds(cut.bounds, self._copies)
                shares = bounds[cut.key]
            tensors.append(SavedTensor(source.name, dtype, numel, offset, shares))
        return CheckpointLayout(tensors, self._writers)

    def part(self, source: TensorSource, piece: Piece) -> Tensor:
        """The elements of a tensor that this rank writes: 1-D, in storage order, a view if possible."""
        elements = slice(piece.start, piece.start + piece.numel)
        parameter, cut = self._find(source)
        if cut is None:
            return in_storage_order(self._whole(source, parameter))[elements]
        if source.optimizer is None:
            return cut.of_parameter(elements)
        state = cut.of_state(self._optimizers[source.optimizer], source.entry, elements)
        # As before a first step: other ranks may keep an entry that this one does not.
        return torch.zeros((), dtype=piece.tensor.dtype).expand(piece.numel) if state is None else state

    def _shares(self, source: TensorSource, numel: int, nbytes: int) -> range:
        """How a tensor that all ranks have is distributed among them for writing."""
        number = len(self._writers)
        if nbytes >= _BYTES_WORTH_SPLITTING:
            length = -(-numel // number)
            return range(0, length * number + 1, length)
        # Each piece costs an entry in the index and a read. A checksum spreads small tensors over the ranks.
        own = zlib.crc32(source.name.encode()) % number
        return range(-own * numel, (number - own) * numel + 1, max(numel, 1))

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
