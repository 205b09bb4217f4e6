"""Which tensors of a checkpoint all ranks write together, and which part of each a rank writes.

A tensor is described in terms that all ranks understand (:class:`TensorSource`). In the checkpoint that rank 0 puts
together, a placeholder on the meta device stands for it: it has shape, strides and dtype but no elements.
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
    """Which tensor it is, the same on all ranks.

    Attributes:
        optimizer: Position of the optimizer whose state it belongs to; None for a parameter.
        parameter: Position of the parameter in the optimizer, or its name.
        entry: Key in the parameter's state; empty for the parameter itself.
    """

    optimizer: int | None
    parameter: int | str
    entry: Any = ""

    @property
    def name(self) -> str:
        """Under which it is written."""
        if self.optimizer is None:
            return f"state_dict/{self.parameter}"
        return f"optimizer_states/{self.optimizer}/state/{self.parameter}/{self.entry}"


def placeholder(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, source: TensorSource) -> Tensor:
    """Stands for a tensor whose elements are written by the ranks that own them; it is pickled with its source."""
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    # Of plain values, which `weights_only` lets pass.
    made.parstrat_source = tuple(source)  # type: ignore[attr-defined]
    return made


def source_of(tensor: Tensor) -> TensorSource | None:
    """What a tensor stands for; None where it is an ordinary one."""
    source = getattr(tensor, "parstrat_source", None)
    return None if source is None else TensorSource(*source)


class CheckpointPieces:
    """Which pieces of the tensors of a training each rank writes, and this rank's.

    What is sharded is written by its owners: where groups of ranks hold a copy each, those that hold the same shard
    write equal parts of it, so that all nodes write, and each element is there once. What is replicated (parameters
    that no optimizer shards, state that every rank keeps) is split evenly where it is large, and otherwise written by
    one rank.

    Args:
        parameters: What sources that are no optimizer's name; the same names on all ranks.
        optimizers: Sources give positions in this sequence.
        cuts: By the position of the optimizer whose state it is, and None for parameters themselves: how they are cut.
            Of what is not in it, every rank has the whole.
        groups: Of each copy of what is sharded the ranks that together hold it, in the order of their shards.
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
        """A copy of a tree in which placeholders stand for parameters, wherever they are found."""
        # By memory, not by identity: a state dict holds detached views. Empty tensors have no memory to tell them
        # apart.
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
        """Which rank writes what of these tensors, by how they are cut alone."""
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
        """Elements of a tensor that this rank writes: 1-D, in storage order, a view where that is possible."""
        elements = slice(piece.start, piece.start + piece.numel)
        parameter, cut = self._find(source)
        if cut is None:
            return in_storage_order(self._whole(source, parameter))[elements]
        if source.optimizer is None:
            return cut.of_parameter(elements)
        state = cut.of_state(self._optimizers[source.optimizer], source.entry, elements)
        # As before a first step: other ranks may keep what this one does not.
        return torch.zeros((), dtype=piece.tensor.dtype).expand(piece.numel) if state is None else state

    def _shares(self, source: TensorSource, numel: int, nbytes: int) -> range:
        """How what all ranks have is shared out among them."""
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
        state_dict: Of ``optimizer``, in torch's own format: with tensors that are whole on every rank, or DTensors.
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
