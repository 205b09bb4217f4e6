"""Keeps writes of your code to gathered parameters in the shards.

A step gathers parameters, uses them, and frees them. A write in between, such as that of a teacher's moving average,
would be lost. Before a unit's parameters are freed, each rank therefore copies its part of them into its shard. Without
a write, that copy changes nothing. So every way to write in place counts, and no write need be noticed. If ``data`` of
a parameter is set, this raises.

If parameters are gathered in fewer bits than their shards have, a copy would round the shards. A write then raises.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.fsdp.cuts import cuts_in_rows
from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import call_before_freeing, copy_all, gathered_by_fsdp


class RefusedWriteError(ValueError):
    """A write to a parameter would be lost, or rounded."""


def refuse_assigned(name: str | None) -> NoReturn:
    """Raises an error for a parameter whose ``data`` was set. None means a parameter on another rank."""
    whose = "a parameter was set on another rank" if name is None else f"parameter {name!r} was set"
    raise RefusedWriteError(
        f"`data` of {whose}. The parameter is sharded, and torch forgets what is assigned to `data`"
        " of a shard. Write in place, under `torch.no_grad()`; or write whole values within"
        " `trainer.strategy.full_parameters()`, which all ranks enter."
    )


def keep_writes(unit: nn.Module, names: Mapping[Tensor, str]) -> None:
    """Keeps writes to a unit's gathered parameters, from now on. Not collective.

    It costs a copy of this rank's shards each time that parameters are freed.

    Args:
        unit: A module that FSDP2 has sharded, and that is gathered. No code of the user's has run meanwhile.
        names: Names of its sharded parameters.
    """
    call_before_freeing(unit, _KeptWrites(unit, names).keep)


class _Part(NamedTuple):
    """A sharded parameter.

    Attributes:
        name: For errors.
        parameter: Holds this rank's shard.
        gathered: What a step reads.
        memory: ``gathered`` as it was at first.
        own: A view of this rank's elements of it, 1-D.
    """

    name: str
    parameter: Tensor
    gathered: Tensor
    memory: Tensor
    own: Tensor

    @property
    def shard(self) -> Tensor:
        return local(self.parameter).view(-1)


class _KeptWrites:
    """Keeps writes to the gathered parameters of one unit."""

    def __init__(self, unit: nn.Module, names: Mapping[Tensor, str]) -> None:
        gathered = gathered_by_fsdp(unit)
        cuts = cuts_in_rows(parameter for parameter, _ in gathered)
        self._parts = [
            _Part(names[parameter], parameter, one, one.detach(), one.detach().view(-1)[cuts[parameter].own])
            for parameter, one in gathered
        ]
        held = [part for part in self._parts if part.own.numel()]
        self._exact = [part for part in held if part.parameter.dtype == part.gathered.dtype]
        self._rounded = [part for part in held if part.parameter.dtype != part.gathered.dtype]
        self._under_way: list[tuple[Tensor, Any]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copies this rank's part of gathered parameters into its shards.

        Raises:
            RefusedWriteError: ``data`` of a parameter was set. Or a parameter was written to while it was gathered in
                another dtype than its shard has. Then only a rank whose part has changed raises. On a GPU, a later call
                raises it: the host does not wait for the device.
        """
        assigned = [part for part in self._parts if not part.gathered.is_set_to(part.memory)]
        for part in assigned:
            part.gathered.data = part.memory
        if assigned:
            refuse_assigned(assigned[0].name)
        if self._exact:
            copy_all([part.shard for part in self._exact], [part.own for part in self._exact])
        if self._rounded:
            self._check_unchanged(self._rounded)

    def _check_unchanged(self, parts: Sequence[_Part]) -> None:
        gathered = torch.cat([part.own for part in parts])
        shards = torch.empty_like(gathered)
        copy_all(list(torch.split(shards, [part.own.numel() for part in parts])), [part.shard for part in parts])
        # As integers: NaN is equal to itself, too.
        changed = gathered.view(torch.int16) != shards.view(torch.int16)
        first = torch.where(changed.any(), changed.view(torch.uint8).argmax(), -1).to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream(changed.device).record_event() if changed.is_cuda else None
        self._under_way.append((first, arrived))
        while self._under_way and (arrived is None or self._under_way[0][1].query()):
            element = int(self._under_way.pop(0)[0])
            if element >= 0:
                ends = itertools.accumulate(part.own.numel() for part in parts)
                part = next(part for part, end in zip(parts, ends, strict=True) if element < end)
                raise RefusedWriteError(
                    f"Parameter {part.name!r} was written to while it was gathered in {part.own.dtype}. Its shards are"
                    f" in {part.parameter.dtype}, so the write would be rounded. Write between steps, such as in"
                    " `on_train_batch_start`; or set param_dtype=None."
                )
