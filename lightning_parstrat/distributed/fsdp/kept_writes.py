"""Keeps writes of your code to gathered parameters in the shards.

A step gathers parameters, uses them, and frees them. A write in between, such as that of a teacher's moving average,
would be lost. Before a unit's parameters are freed, each rank therefore copies its part of them into its shard. Without
a write, that copy changes nothing. So every way to write in place counts, and no write need be noticed. If ``data`` of
a parameter is set, this raises.

If parameters are gathered in fewer bits than their shards have, a copy would round the shards. A write then raises.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.fsdp.cuts import cuts_in_rows
from lightning_parstrat.distributed.fsdp.state import shard_like
from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import call_before_freeing, copy_all, fsdp_params_of, gathered_by_fsdp


def keep_writes(root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Keeps writes to gathered parameters, from now on. Not collective.

    It costs a copy of this rank's shards each time that parameters are freed.

    Args:
        root: Names the parameters in errors.
        parts: Modules within ``root`` that FSDP2 has sharded.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    for part in parts:
        call_before_freeing(part, _KeptWrites(part, names).keep)


def refuse_assigned(name: str | None) -> NoReturn:
    """Raises an error for a parameter whose ``data`` was set. None means a parameter on another rank."""
    whose = "a parameter was set on another rank" if name is None else f"parameter {name!r} was set"
    raise RuntimeError(
        f"`data` of {whose}. The parameter is sharded, and torch forgets what is assigned to `data`"
        " of a shard. Write in place, under `torch.no_grad()`; or write whole values within"
        " `trainer.strategy.full_parameters()`, which all ranks enter."
    )


class _Part(NamedTuple):
    """This rank's part of a parameter, 1-D: its shard, and the same elements of the gathered parameter."""

    name: str
    shard: Tensor
    gathered: Tensor


class _KeptWrites:
    """Keeps writes to the gathered parameters of one unit.

    Args:
        unit: A module that FSDP2 has sharded.
        names: Names of its sharded parameters.
    """

    def __init__(self, unit: nn.Module, names: dict[Tensor, str]) -> None:
        self._unit = unit
        self._names = [names[shard] for shard, _ in fsdp_params_of(unit)]
        self._memory: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        # The gathered tensor of each parameter, and this rank's part of it, 1-D. If the part is not one run of
        # elements, None.
        self._under_way: list[tuple[Tensor, Any]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copies this rank's part of gathered parameters into its shards.

        Raises:
            RuntimeError: ``data`` of a parameter was set. Or a parameter was written to while it was gathered in
                another dtype than its shard has. Then only a rank whose part has changed raises. On a GPU, a later call
                raises it: the host does not wait for the device.
        """
        exact: list[_Part] = []
        rounded: list[_Part] = []
        assigned: list[str] = []
        for name, (parameter, gathered) in zip(self._names, gathered_by_fsdp(self._unit), strict=True):
            value = gathered.detach()
            if gathered not in self._memory:
                # The first call comes before any code of the user's.
                cut = cuts_in_rows([parameter]).get(parameter)
                self._memory[gathered] = value, None if cut is None else value.view(-1)[cut.own]
            memory, own = self._memory[gathered]
            if (value.data_ptr(), value.shape, value.stride()) != (memory.data_ptr(), memory.shape, memory.stride()):
                gathered.data = memory
                assigned.append(name)
            shard = local(parameter).view(-1)
            if shard.numel():
                part = _Part(name, shard, local(shard_like(memory, parameter)).view(-1) if own is None else own)
                (exact if shard.dtype == memory.dtype else rounded).append(part)
        if assigned:
            refuse_assigned(assigned[0])
        if exact:
            copy_all([part.shard for part in exact], [part.gathered for part in exact])
        if rounded:
            self._check_unchanged(rounded)

    def _check_unchanged(self, parts: list[_Part]) -> None:
        gathered = torch.cat([part.gathered for part in parts])
        shards = torch.empty_like(gathered)
        copy_all(list(torch.split(shards, [part.shard.numel() for part in parts])), [part.shard for part in parts])
        # As integers: NaN is equal to itself, too.
        changed = gathered.view(torch.int16) != shards.view(torch.int16)
        first = torch.where(changed.any(), changed.view(torch.uint8).argmax(), -1).to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream(changed.device).record_event() if changed.is_cuda else None
        self._under_way.append((first, arrived))
        while self._under_way and (arrived is None or self._under_way[0][1].query()):
            element = int(self._under_way.pop(0)[0])
            if element >= 0:
                ends = itertools.accumulate(part.shard.numel() for part in parts)
                part = next(part for part, end in zip(parts, ends, strict=True) if element < end)
                raise RuntimeError(
                    f"Parameter {part.name!r} was written to while it was gathered in {gathered.dtype}. Its shards are"
                    f" in {part.shard.dtype}, so the write would be rounded. Write between steps, such as in"
                    " `on_train_batch_start`; or set gather_dtype=None."
                )
