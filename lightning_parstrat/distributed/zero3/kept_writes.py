"""Keeps writes of your code to gathered parameters in the shards.

A step gathers parameters, uses them, and frees them. Without more, a write in between would be lost, such as that of a
teacher's moving average. Before a unit's parameters are freed, each rank therefore copies its part of them into its
shard. If nobody has written, that copy changes nothing. So every way to write counts, and no write need be noticed.

If parameters are gathered in fewer bits than their shards have, a copy would round the shards. A write then raises.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import call_before_freeing, copy_all, gathered_by_fsdp, kept_by_fsdp
from lightning_parstrat.distributed.zero3.cuts import cuts_in_rows
from lightning_parstrat.distributed.zero3.state import shard_like


def keep_writes(root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Keeps what is written to gathered parameters, from now on. Not collective.

    Costs a copy of this rank's shards each time that parameters are freed.

    Args:
        root: Names the parameters in errors.
        parts: Sharded by FSDP2, within ``root``.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    for part in parts:
        call_before_freeing(part, _KeptWrites(part, names).keep)


class _KeptWrites:
    """Keeps what is written to the gathered parameters of one unit.

    Args:
        unit: Sharded by FSDP2.
        names: Of its sharded parameters.
    """

    def __init__(self, unit: nn.Module, names: dict[Tensor, str]) -> None:
        self._unit = unit
        self._names = [names[shard] for shard, _ in kept_by_fsdp(unit)]
        self._memory: dict[Tensor, _Memory] = {}
        self._on_their_way: list[tuple[Tensor, Any]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copies this rank's part of what is gathered into its shards.

        Raises:
            RuntimeError: A parameter was written to that is gathered in another dtype than its shard has. Only a rank
                whose part has changed raises. On a GPU a later call raises it: the host does not wait for the device.
            ValueError: ``data`` of a parameter was set to a tensor of another shape.
        """
        exact: list[_Part] = []
        rounded: list[_Part] = []
        pairs = gathered_by_fsdp(self._unit)
        for parameter, gathered in pairs:
            if gathered not in self._memory:
                self._memory[gathered] = _memory_of(gathered.detach(), parameter)
        self._bring_back([gathered for _, gathered in pairs])
        for name, (parameter, gathered) in zip(self._names, pairs, strict=True):
            whole, own = self._memory[gathered]
            shard = local(parameter).view(-1)
            if shard.numel():
                part = _Part(name, shard, local(shard_like(whole, parameter)).view(-1) if own is None else own)
                (exact if shard.dtype == whole.dtype else rounded).append(part)
        if exact:
            copy_all([part.shard for part in exact], [part.gathered for part in exact])
        if rounded:
            self._check_unchanged(rounded)

    def _bring_back(self, gathered: Iterable[Tensor]) -> None:
        """Copies what ``data`` was set to into the memory that is gathered into, and has ``data`` be that again."""
        values = []
        for name, parameter in zip(self._names, gathered, strict=True):
            value, (memory, _) = parameter.detach(), self._memory[parameter]
            is_there = value.data_ptr() == memory.data_ptr() and value.stride() == memory.stride()
            if not (is_there and value.shape == memory.shape):
                parameter.data = memory
                # A copy: it may be another parameter's, to which something is copied, too.
                values.append((name, memory, value.clone() if value.untyped_storage().nbytes() else None))
        for name, memory, copied in values:
            if copied is None:
                raise RuntimeError(
                    f"`data` of {name!r} was set to memory of another block, which is free by now. Set it to a copy:"
                    " `parameter.data = other.data.clone()`."
                )
            if copied.shape != memory.shape:
                raise ValueError(
                    f"`data` of {name!r} was set to a tensor of shape {list(copied.shape)}, and the parameter is"
                    f" {list(memory.shape)}. Set it to one of that shape."
                )
            memory.copy_(copied)

    def _check_unchanged(self, parts: list["_Part"]) -> None:
        gathered = torch.cat([part.gathered for part in parts])
        shards = torch.empty_like(gathered)
        copy_all(list(torch.split(shards, [part.shard.numel() for part in parts])), [part.shard for part in parts])
        # As integers: NaN is equal to itself, too.
        changed = gathered.view(torch.int16) != shards.view(torch.int16)
        first = torch.where(changed.any(), changed.view(torch.uint8).argmax(), -1).to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream(changed.device).record_event() if changed.is_cuda else None
        self._on_their_way.append((first, arrived))
        while self._on_their_way and (arrived is None or self._on_their_way[0][1].query()):
            element = int(self._on_their_way.pop(0)[0])
            if element >= 0:
                ends = itertools.accumulate(part.shard.numel() for part in parts)
                part = next(part for part, end in zip(parts, ends, strict=True) if element < end)
                raise RuntimeError(
                    f"Parameter {part.name!r} was written to while it was gathered in {gathered.dtype}. Its shards are"
                    f" in {part.shard.dtype}, so the write would be rounded. Write between steps, such as in"
                    " `on_train_batch_start`; or set gather_dtype=None."
                )


class _Part(NamedTuple):
    """This rank's part of a parameter, 1-D: its shard, and the same elements of what is gathered."""

    name: str
    shard: Tensor
    gathered: Tensor


class _Memory(NamedTuple):
    """The memory that a parameter is gathered into, and this rank's part of it, 1-D; None if it is not one run."""

    whole: Tensor
    own: Tensor | None


def _memory_of(whole: Tensor, parameter: DTensor) -> _Memory:
    cut = cuts_in_rows([parameter]).get(parameter)
    return _Memory(whole, None if cut is None or cut.own is None else whole.view(-1)[cut.own])
