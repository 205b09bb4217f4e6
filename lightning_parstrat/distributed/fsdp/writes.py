"""Writes of your code to parameters of a sharded module: kept in the shards, or refused. What it freezes is kept, too.

A step gathers parameters, uses them, and frees them. A write in between, such as that of a teacher's moving average,
would be lost. Before a part's parameters are freed, each rank therefore copies its elements of them into its shards.
Without a write, that copy changes nothing. So every way to write in place counts, and no write need be noticed.

Two kinds of writes cannot be kept. If ``data`` of a parameter is set, torch forgets what was assigned. If parameters
are gathered in fewer bits than their shards have, a copy would round the shards. Both are found at the end of a step.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_parstrat.distributed.engine.cuts import local, own_rows
from lightning_parstrat.distributed.torch_compat import call_before_freeing, copy_all, gathered_by_fsdp


class RefusedWriteError(ValueError):
    """A write to a parameter would be lost, or rounded."""


class Writes:
    """Keeps writes to gathered parameters, from now on. Collective: it gathers every part once.

    It costs a copy of this rank's shards each time that parameters are freed.

    Args:
        module: FSDP2 has sharded it, and modules below it.
        device: The device of the parameters.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        parts: dict[str, Any] = {n: part for n, part in module.named_modules() if isinstance(part, FSDPModule)}
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._parts = list(parts)
        self._rounded = torch.zeros(len(parts), dtype=torch.bool, device=device)
        self._read = torch.zeros(len(parts), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._storages = []
        self._trained: dict[Tensor, bool] = {}
        """Whether each gathered tensor was trained when it and its shard were last alike."""
        for number, part in enumerate(parts.values()):
            part.unshard()
            gathered = gathered_by_fsdp(part)
            # Setting `data` gives a tensor another storage.
            both = [(names[parameter], tensor) for parameter, one in gathered for tensor in (parameter, one)]
            self._storages += [(name, tensor, tensor.untyped_storage()) for name, tensor in both]
            whole = [(shard, local(one.detach())) for shard, one in gathered]
            own = [(shard, one.view(-1)[own_rows(shard, one)]) for shard, one in whole]
            own = [pair for pair in own if pair[1].numel()]
            call_before_freeing(part, functools.partial(self._keep, number, part, own))
            part.reshard()

    def freeze_alike(self, part: nn.Module) -> None:
        """Freezes or unfreezes shards as your code has done with their gathered tensors, or the other way round.

        Not collective. Call it before each forward, too: a part may still be gathered.
        """
        for shard, one in gathered_by_fsdp(part):
            is_as_before = one.requires_grad == self._trained.get(one, shard.requires_grad)
            trained = (shard if is_as_before else one).requires_grad
            for tensor in (shard, one):
                if tensor.requires_grad != trained:
                    tensor.requires_grad_(trained)
            self._trained[one] = trained

    @torch.no_grad()
    def _keep(self, number: int, part: nn.Module, own: list[tuple[Tensor, Tensor]]) -> None:
        """Copies this rank's elements of gathered parameters into its shards, or notes that they would be rounded."""
        self.freeze_alike(part)
        for parameter, one in own:
            if local(parameter).numel() != one.numel():
                name = next(name for name, known, _ in self._storages if known is parameter)
                # Such as `torch.nn.init.eye_`, which gives its result to `out`.
                raise refusal(f"{name!r} was given another size")
        exact = [(local(parameter).view(-1), one) for parameter, one in own if parameter.dtype == one.dtype]
        if exact:
            copy_all(*map(list, zip(*exact, strict=True)))
        narrow = [(local(parameter).view(-1), one) for parameter, one in own if parameter.dtype != one.dtype]
        if narrow:
            gathered = torch.cat([one for _, one in narrow])
            rounded = torch.empty_like(gathered)
            copy_all(list(torch.split(rounded, [one.numel() for _, one in narrow])), [shard for shard, _ in narrow])
            # As integers: NaN is equal to itself, too. Nothing waits for a GPU.
            self._rounded[number] |= (gathered.view(torch.int16) != rounded.view(torch.int16)).any()

    def refused(self, waits: bool = False) -> str | None:
        """The writes that cannot be kept, as text. Not collective.

        Args:
            waits: Whether the host waits for a GPU. Otherwise a write that would be rounded may be seen a step later.
        """
        for name, one, storage in self._storages:
            if one.untyped_storage() is not storage:
                return f"`data` of parameter {name!r} was set"
        self._read.copy_(self._rounded, non_blocking=not waits)
        for part, is_rounded in zip(self._parts, self._read.tolist(), strict=True):
            if is_rounded:
                return f"A parameter of {part or 'the root'!r} was written to while it was gathered in bf16"
        return None

    def check(self) -> None:
        """Checks the writes so far. Not collective. The host waits for a GPU.

        Raises:
            RefusedWriteError: This rank has written what cannot be kept.
        """
        what = self.refused(waits=True)
        if what is not None:
            raise refusal(what)


def refusal(what: str | None) -> RefusedWriteError:
    """The error for a write on this rank, or on another rank (None)."""
    return RefusedWriteError(
        f"{what or 'Another rank has written to a parameter'}. It is sharded: torch forgets what is assigned to `data`"
        " of a shard, and what was gathered in fewer bits would round a shard. Write in place under `torch.no_grad()`,"
        " between steps or with param_dtype=None. Or write whole values within"
        " `trainer.strategy.full_parameters()`, which all ranks enter."
    )
