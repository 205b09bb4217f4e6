"""Shards a module: each unit gets memory and rank 0's values, and is sharded by FSDP2, before the next one is.

So a module on the meta device is never on a device as a whole.
"""

import weakref
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.fsdp.held_parameters import refuse_uses
from lightning_parstrat.distributed.fsdp.units import find_units, whole_parameters
from lightning_parstrat.distributed.fsdp.whole import let_be_copied
from lightning_parstrat.distributed.torch_compat import fsdp_params_of, gather_in, take_over_attributes

_SHARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_sharded_module(module: nn.Module) -> bool:
    """Whether :func:`shard` has sharded the module."""
    return module in _SHARDED


def shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    policy: FullShardingPolicy,
    by_child: bool,
) -> None:
    """Shards a module in place, for good. Its class becomes a subclass of FSDP2's. Collective.

    Args:
        module: On the host, on the device or on the meta device, which may differ by rank.
        group: Gathers the parameters.
        device: The device on which the module is to train.
        policy: Which modules are units, and whether they free their parameters between forward and backward.
        by_child: Whether training calls children of the root. Then no parameters of the root itself are gathered.

    Raises:
        ValueError: A parameter that rank 0 has on the meta device cannot be made. Or the policy names no class of a
            module. Or a part of the module is sharded already.
    """
    before = dict(module.named_parameters())
    for name, parameter in before.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name!r} is sharded already: by `fully_shard` or `parallelize_module`, or as a part of another module"
                " that has trained. Leave these calls out, as zero3_custom shards the module. Or make a new module,"
                " and load weights into it before the training."
            )
    units = find_units(module, policy.auto_wrap_policy or (), policy.min_num_params, by_child)
    whole = whole_parameters(module, units)
    if by_child:
        inside = {parameter for unit in units for parameter in unit.parameters()}
        whole |= {parameter for parameter in before.values() if parameter not in inside}
    to_reset = _parts_without_values(module, whole, group, device)
    mesh = DeviceMesh.from_group(group, device.type)
    names = {part: name for name, part in module.named_modules()}
    own = set(vars(module))
    # None: the root's parameters stay gathered from forward to backward, which follow each other at once.
    for part, reshards in [*((unit, policy.reshard_after_forward) for unit in units), (module, None)]:
        _make_on_device(part, whole, to_reset, group, device)
        precision = MixedPrecisionPolicy(reduce_dtype=_summed_in(part, whole), cast_forward_inputs=False)
        ignored = cast(Any, whole)
        fully_shard(part, mesh=mesh, reshard_after_forward=reshards, mp_policy=precision, ignored_params=ignored)
        for _, fsdp_param in fsdp_params_of(part):
            gather_in(fsdp_param, None)
        # Now, as this frees the memory of what was sharded.
        for name, parameter in part.named_parameters(names[part]):
            old = before.pop(name, parameter)
            if old is not parameter:
                take_over_attributes(old, parameter)
                refuse_uses(old, name)
    let_be_copied([*units, module], vars(module).keys() - own)
    _SHARDED.add(module)


def _summed_in(part: nn.Module, whole: set[Tensor]) -> torch.dtype | None:
    """The dtype in which FSDP2 is to sum the gradients of a module's own shards. None for their own dtype."""
    dtypes = {p.dtype for p in part.parameters() if p not in whole and not isinstance(p, DTensor)}
    return None if torch.float64 in dtypes else torch.float32


def _parts_without_values(
    module: nn.Module, whole: Collection[Tensor], group: dist.ProcessGroup, device: torch.device
) -> set[nn.Module]:
    """The parts that have no values on rank 0 yet: their ``reset_parameters`` is to be called on all ranks.

    Collective: three bytes per tensor.

    Raises:
        ValueError: Such a part has no ``reset_parameters``, or only some ranks can shard a parameter. Raised on all
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
    parts, unmade = set(), []
    tensors = {named[name] for name in without_values}
    for name, part in module.named_modules():
        own = (*part.named_parameters(name, recurse=False), *part.named_buffers(name, recurse=False))
        names = [tensor_name for tensor_name, tensor in own if tensor in tensors]
        if names and callable(getattr(part, "reset_parameters", None)):
            parts.add(part)
        else:
            unmade += [f"{one} of {type(part).__name__}" for one in names]
    if unmade:
        raise ValueError(
            f"On rank 0 these are on the meta device without values: {listed(unmade)}. There is no method"
            " `reset_parameters` to give them some. Make the module on the host on rank 0 alone, and on the meta device"
            " on all other ranks; or define that method."
        )
    return parts


@torch.no_grad()
def _make_on_device(
    module: nn.Module,
    whole: set[Tensor],
    to_reset: Collection[nn.Module],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Brings tensors that are not sharded yet to a device, with rank 0's values. Collective.

    Every rank resets the parts in ``to_reset``, so that all random generators stay synchronized. Replacements of
    parameters in ``whole`` are added to it.
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
