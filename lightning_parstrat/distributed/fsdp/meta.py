"""Modules on the meta device: memory for tensors that rank 0 broadcasts, and rank 0's values."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors


def agree_on_parts(
    module: nn.Module, whole: Collection[Tensor], group: dist.ProcessGroup, device: torch.device
) -> set[nn.Module]:
    """Finds the parts of a module that have no values on rank 0 yet. Collective: three bytes per tensor.

    Args:
        module: The same on all ranks, but each tensor may be on the meta device on some of them.
        whole: Parameters that this rank cannot shard.
        group: Carries the message.
        device: A device that the group can send from.

    Returns:
        The same parts on all ranks. Their ``reset_parameters`` is to be called.

    Raises:
        ValueError: Such a part has no ``reset_parameters``, or only some ranks cannot shard a parameter. Raised on all
            ranks.
    """
    named = dict((*module.named_parameters(), *module.named_buffers()))
    makes = dist.get_rank(group) == 0
    flags = [[makes and one.is_meta, one in whole, one not in whole] for one in named.values()]
    combined = torch.tensor(flags, dtype=torch.uint8, device=device).reshape(-1, 3)
    if named:
        dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=group)
    without_values, kept_whole, sharded = (
        {name for name, flag in zip(named, column, strict=True) if flag} for column in combined.T.tolist()
    )
    if differing := sorted(kept_whole & sharded):
        raise ValueError(
            f"{listed(differing)}: these cannot be sharded on some ranks, but on others they can. Make parameters"
            " contiguous, and without memory that they share, on all ranks."
        )
    parts, unmade, kinds = set(), [], set()
    tensors = {named[name] for name in without_values}
    for name, part in module.named_modules():
        own = (*part.named_parameters(name, recurse=False), *part.named_buffers(name, recurse=False))
        names = [tensor_name for tensor_name, tensor in own if tensor in tensors]
        if names and callable(getattr(part, "reset_parameters", None)):
            parts.add(part)
        elif names:
            unmade += names
            kinds.add(type(part).__name__)
    if unmade:
        raise ValueError(
            f"On rank 0 these are on the meta device, where they have no values: {listed(unmade)} of"
            f" {' and '.join(sorted(kinds))}, which has no method `reset_parameters` to give them some. Make the module"
            " on the host on rank 0 alone, and on the meta device on all other ranks; or define that method."
        )
    return parts


@torch.no_grad()
def make_on_device(
    module: nn.Module,
    whole: set[Tensor],
    to_reset: Collection[nn.Module],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Brings tensors that are not sharded yet to a device, with rank 0's values. Collective.

    Args:
        module: A unit, or the root.
        whole: Parameters that stay whole. Their replacements are added.
        to_reset: The result of :func:`agree_on_parts`. Rank 0's values are broadcast, but every rank resets these
            parts. So all random generators stay synchronized.
        group: Broadcasts.
        device: The device on which the module is to train.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        before = dict(part.named_parameters(recurse=False))
        if any(tensor.is_meta for tensor in (*before.values(), *part.buffers(recurse=False))):
            part.to_empty(device=device, recurse=False)
            if part in to_reset:
                part.reset_parameters()  # type: ignore[operator]
            for own, parameter in before.items():
                # Making a module makes other parameters. Tied parameters must be tied again.
                setattr(part, own, replaced.setdefault(parameter, getattr(part, own)))
            whole.update(replaced[parameter] for parameter in before.values() if parameter in whole)
    tensors: list[Tensor] = []
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            tensors.append(tensor)
    broadcast_tensors(tensors, group)
