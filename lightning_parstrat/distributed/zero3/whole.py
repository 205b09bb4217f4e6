"""A sharded module as a plain one with whole parameters, for a while; what is written to them stays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.zero3.copies import plain
from lightning_parstrat.distributed.zero3.state import shard_like


class _Place(NamedTuple):
    """Where a sharded parameter is registered."""

    owner: nn.Module
    own_name: str
    name: str
    parameter: DTensor


@contextmanager
def shown_whole(module: nn.Module) -> Iterator[None]:
    """Within it a module is a plain one with whole parameters, in the dtype that they are kept in.

    Collective at its beginning: an all-gather of each parameter. Within it nothing is sent. When it ends, each rank
    takes its part of each parameter back into its shard.

    Args:
        module: Sharded by FSDP2; it must not be within a step.

    Raises:
        ValueError: When it ends: a parameter is gone, or has another shape or dtype.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    places = [
        _Place(owner, own_name, f"{prefix}.{own_name}".lstrip("."), parameter)
        for prefix, owner in module.named_modules()
        for own_name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    shown: dict[Tensor, nn.Parameter] = {}
    ended: list[bool] = []
    for place in places:
        if place.parameter not in shown:
            shown[place.parameter] = _make_whole(place, ended)
    with plain(module):
        try:
            for place in places:
                setattr(place.owner, place.own_name, shown[place.parameter])
            yield
        finally:
            ended.append(True)
            _bring_back(places)


def _make_whole(place: _Place, ended: Sequence[bool]) -> nn.Parameter:
    parameter = place.parameter
    whole = nn.Parameter(cast(DTensor, parameter.detach()).full_tensor(), parameter.requires_grad)
    vars(whole).update(vars(parameter))

    def refuse(_: Tensor) -> None:
        if ended:
            raise RuntimeError(
                f"A backward came to {place.name!r} as `full_parameters()` had shown it, whose gradient no optimizer"
                " would see. Compute the loss outside of it."
            )

    if whole.requires_grad:
        whole.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    return whole


@torch.no_grad()
def _bring_back(places: Sequence[_Place]) -> None:
    written: dict[DTensor, nn.Parameter | None] = {}
    lost = []
    for place in places:
        parameter = place.parameter
        now = dict(place.owner.named_parameters(recurse=False)).get(place.own_name)
        first = written.setdefault(parameter, now)
        fits = now is not None and now.shape == parameter.shape and now.dtype == parameter.dtype
        if not fits or (first is not now and not torch.equal(cast(Tensor, first), cast(Tensor, now))):
            lost.append(place.name)
        setattr(place.owner, place.own_name, parameter)
    if lost:
        raise ValueError(
            f"Within `full_parameters()` {listed(lost)} got another shape or dtype, or another value than what it is"
            " tied to, or was removed. The shards are as they were before. Change a copy of the module instead, or of"
            " its `state_dict()`."
        )
    for parameter, now in written.items():
        value = cast(nn.Parameter, now)
        local(parameter).copy_(local(shard_like(value.detach(), parameter)))
        parameter.requires_grad_(value.requires_grad)
