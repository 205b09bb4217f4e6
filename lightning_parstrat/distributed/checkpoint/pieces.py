"""Which part of each tensor of a checkpoint a rank writes when all ranks write together.

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

from lightning_parstrat.core.tensor_trees import in_storage_order, leaves, replace_leaves
from lightning_parstrat.distributed.checkpoint.cuts import Cut
from lightning_parstrat.distributed.checkpoint.index import CheckpointIndex, SplitBounds, StoredTensor
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.state import StandIn, grouped_parameters

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
    entry: str = ""


class Named(NamedTuple):
    """What a placeholder stands for, and the dtype of its elements."""

    source: TensorSource
    dtype: torch.dtype


class Placeholders:
    """Stand for tensors whose elements are written by the ranks that own them."""

    def __init__(self) -> None:
        self._issued: dict[int, tuple[Tensor, TensorSource]] = {}

    def issue(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, source: TensorSource) -> Tensor:
        """A tensor on the meta device, known from then on."""
        placeholder = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        # Kept, too: an id is given again once its object is gone.
        self._issued[id(placeholder)] = placeholder, source
        return placeholder

    def for_slots(self, optimizer: int) -> StandIn:
        """Issues them for the state of an optimizer that is cut in buckets.

        Args:
            optimizer: Its position.
        """

        def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
            return self.issue(slot.parameter.shape, slot.strides, dtype, TensorSource(optimizer, position, entry))

        return stand_in

    def source_of(self, tensor: Tensor) -> TensorSource | None:
        """What a tensor stands for; None where it is an ordinary one."""
        return self._issued[id(tensor)][1] if id(tensor) in self._issued else None


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
        self._groups = groups

    def with_placeholders(self, tree: Any, placeholders: Placeholders) -> Any:
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
                issued[name] = placeholders.issue(tensor.shape, self._strides(source), tensor.dtype, source)
            return issued[name]

        return replace_leaves(tree, replacement)

    def index(self, named: Mapping[str, Named]) -> CheckpointIndex:
        """Where each rank writes what: by the layout alone. Linear in the number of tensors, whatever the ranks."""
        cuts: dict[Any, tuple[int, Sequence[int]]] = {}
        tensors = []
        for name, (source, dtype) in named.items():
            parameter, cut = self._find(source)
            if cut is None:
                numel, offset = self._whole(source, parameter).numel(), 0
                key: Any = self._shares(source, numel, numel * dtype.itemsize)
                bounds: Sequence[int] = key
            else:
                numel, offset, key = cut.numel, cut.offset, cut.key
                bounds, copies = cut.bounds, len(self._groups)
                bounds = bounds if copies == 1 else SplitBounds(bounds, copies)
            number, _ = cuts.setdefault(key, (len(cuts), bounds))
            tensors.append(StoredTensor(name, dtype, numel, number, offset))
        return CheckpointIndex(tensors, [bounds for _, bounds in cuts.values()], self._groups)

    def part(self, named: Named, start: int, numel: int) -> Tensor:
        """Elements of a tensor that this rank writes: 1-D, in storage order, a view where that is possible."""
        source, elements = named.source, slice(start, start + numel)
        parameter, cut = self._find(source)
        if cut is None:
            return in_storage_order(self._whole(source, parameter))[elements]
        if source.optimizer is None:
            return cut.of_parameter(elements)
        state = cut.of_state(self._optimizers[source.optimizer], source.entry, elements)
        # As before a first step: other ranks may keep what this one does not.
        return torch.zeros(numel, dtype=named.dtype) if state is None else state

    def _shares(self, source: TensorSource, numel: int, nbytes: int) -> range:
        """How what all ranks have is shared out among them."""
        number = len(self._groups) * len(self._groups[0])
        if nbytes >= _BYTES_WORTH_SPLITTING:
            length = -(-numel // number)
            return range(0, length * number + 1, length)
        # Each piece costs an entry in the index and a read. A checksum spreads small tensors over the ranks.
        own = zlib.crc32(repr(source).encode()) % number
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

    def _strides(self, source: TensorSource) -> Sequence[int]:
        parameter, cut = self._find(source)
        return strides_in_storage(parameter) if cut is None else cut.strides


def with_placeholders_for_state(
    state_dict: dict[str, Any], optimizer: Optimizer, position: int, placeholders: Placeholders
) -> dict[str, Any]:
    """A copy of a state dict, with placeholders for tensors of their parameter's shape.

    Args:
        state_dict: Of ``optimizer``, in torch's own format: with tensors that are whole on every rank, or DTensors.
        optimizer: Its optimizer, which steps parameters, not shards in buckets.
        position: Position of the optimizer among those of the training.
        placeholders: Issues the placeholders.
    """
    parameters = grouped_parameters(optimizer)
    state = {}
    for index, entries in state_dict["state"].items():
        state[index] = entries
        if not isinstance(index, int):
            continue
        large = [key for key, value in entries.items() if _is_like(value, parameters[index])]
        state[index] = {
            **entries,
            **{
                key: placeholders.issue(
                    entries[key].shape,
                    strides_in_storage(entries[key]),
                    entries[key].dtype,
                    TensorSource(position, index, key),
                )
                for key in large
            },
        }
    return {**state_dict, "state": state}


def strides_in_storage(tensor: Tensor) -> Sequence[int]:
    """The strides of a tensor whose elements are :func:`in_storage_order` of ``tensor``."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def sources_in(tree: Any, placeholders: Placeholders) -> dict[str, Named]:
    """What the placeholders of a tree stand for, by the name of the place where each is found first."""
    named: dict[str, Named] = {}
    seen: set[int] = set()
    for leaf in leaves(tree):
        source = placeholders.source_of(leaf.tensor)
        if source is not None and id(leaf.tensor) not in seen:
            seen.add(id(leaf.tensor))
            named[leaf.name] = Named(source, leaf.tensor.dtype)
    return named


def _is_like(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return False
    return value.dim() > 0 and value.shape == parameter.shape and value.numel() > 0


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
