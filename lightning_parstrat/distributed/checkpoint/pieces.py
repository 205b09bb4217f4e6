"""Which part of each tensor of a checkpoint a rank writes when all ranks write together.

A tensor is described in terms that all ranks understand (:class:`TensorSource`). In the checkpoint that rank 0 puts
together, a placeholder on the meta device stands for it: it has shape, strides and dtype but no elements.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import in_storage_order, leaves, replace_leaves
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded, sharding_of
from lightning_parstrat.distributed.zero1.state_dict import grouped_parameters
from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS

_BYTES_WORTH_SPLITTING = 2**22


class TensorSource(NamedTuple):
    """Which tensor it is, the same on all ranks.

    Attributes:
        optimizer: Position of the optimizer whose state it belongs to; None for a parameter of the module.
        parameter: Position of the parameter in the optimizer, or its name in the module.
        entry: Key in the parameter's state; empty for the parameter itself.
    """

    optimizer: int | None
    parameter: int | str
    entry: str = ""


class Piece(NamedTuple):
    """The part of a tensor that one rank writes: a run of its elements, in the order in which they lie in memory.

    Attributes:
        elements: 1-D; a view where that is possible.
        start: Position of the first element.
        numel: Elements of the uncut tensor.
    """

    elements: Tensor
    start: int
    numel: int


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

    def source_of(self, tensor: Tensor) -> TensorSource | None:
        """What a tensor stands for; None where it is an ordinary one."""
        return self._issued[id(tensor)][1] if id(tensor) in self._issued else None


class CheckpointPieces:
    """This rank's pieces of the tensors of a training.

    What is sharded is written by its owner. What is replicated (parameters that no optimizer shards, state that every
    rank keeps) is split evenly where it is large, and otherwise written by one rank.

    Args:
        module: Sources name its parameters.
        optimizers: Sources give positions in this sequence.
        slots: Slots of the parameters that are sharded now.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        slots: Mapping[Tensor, ParameterSlot],
        rank: int,
        world_size: int,
    ) -> None:
        self._parameters = dict(module.named_parameters())
        self._optimizers = optimizers
        self._slots = slots
        self._rank = rank
        self._world_size = world_size

    def with_placeholders(self, tree: Any, placeholders: Placeholders) -> Any:
        """A copy of a tree in which placeholders stand for the module's parameters, wherever they are found."""
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

    def of(self, source: TensorSource) -> Piece | None:
        """This rank's piece; None where it owns nothing of the tensor."""
        parameter, slot = self._find(source)
        if slot is None:
            return self._share(self._whole(source, parameter), source)
        if slot.shard is None or slot.shard_slice is None:
            return None
        if source.optimizer is None:
            flat = slot.storage_order(parameter.detach())
            elements = flat[slot.shard_slice.elements]
        else:
            elements = in_storage_order(self._state_of(source, slot.shard))
        return Piece(elements, slot.shard_slice.parameter_start, slot.place.numel)

    def _share(self, whole: Tensor, source: TensorSource) -> Piece | None:
        flat = in_storage_order(whole)
        if flat.nbytes < _BYTES_WORTH_SPLITTING:
            # Each piece costs an entry in the index and a read. A checksum spreads small tensors over the ranks;
            # Python's `hash()` would differ between them.
            is_own = zlib.crc32(repr(source).encode()) % self._world_size == self._rank
            return Piece(flat, 0, flat.numel()) if is_own and flat.numel() else None
        first = flat.numel() * self._rank // self._world_size
        last = flat.numel() * (self._rank + 1) // self._world_size
        return Piece(flat[first:last], first, flat.numel()) if last > first else None

    def _find(self, source: TensorSource) -> tuple[Tensor, ParameterSlot | None]:
        if source.optimizer is None:
            parameter: Tensor = self._parameters[str(source.parameter)]
            return parameter, self._slots.get(parameter)
        optimizer = self._optimizers[source.optimizer]
        parameter = grouped_parameters(optimizer)[int(source.parameter)]
        return parameter, sharding_of(optimizer).slots.get(parameter) if is_sharded(optimizer) else None

    def _whole(self, source: TensorSource, parameter: Tensor) -> Tensor:
        if source.optimizer is None:
            return parameter.detach()
        value: Tensor = self._optimizers[source.optimizer].state[parameter][source.entry]
        return value.detach()

    def _state_of(self, source: TensorSource, shard: Tensor) -> Tensor:
        if source.entry == MASTER_WEIGHTS:
            return shard.detach()
        if source.optimizer is None:
            raise AssertionError(f"{source} is no state of an optimizer")
        value: Tensor = self._optimizers[source.optimizer].state[shard][source.entry]
        return value.detach()

    def _strides(self, source: TensorSource) -> Sequence[int]:
        parameter, slot = self._find(source)
        return strides_in_storage(parameter) if slot is None else slot.strides


def with_placeholders_for_state(
    state_dict: dict[str, Any], optimizer: Optimizer, position: int, placeholders: Placeholders
) -> dict[str, Any]:
    """A copy of a replicated state dict, with placeholders for tensors of their parameter's shape.

    Args:
        state_dict: Of ``optimizer``, in torch's own format.
        optimizer: Its optimizer, which is not sharded.
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


def sources_in(tree: Any, placeholders: Placeholders) -> dict[str, TensorSource]:
    """What the placeholders of a tree stand for, by the name of the place where each is found first."""
    named: dict[str, TensorSource] = {}
    seen: set[int] = set()
    for leaf in leaves(tree):
        source = placeholders.source_of(leaf.tensor)
        if source is not None and id(leaf.tensor) not in seen:
            seen.add(id(leaf.tensor))
            named[leaf.name] = source
    return named


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape and value.numel() > 0


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
