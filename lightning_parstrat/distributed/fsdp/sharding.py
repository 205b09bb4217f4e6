"""Shards a module: each unit gets memory and rank 0's values, and is sharded by FSDP2, before the next one is.

So a module on the meta device is never on a device as a whole.
"""

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroups, ShardPlace
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.fsdp.state import holds_shards
from lightning_parstrat.distributed.fsdp.tensor_plan import PlannedLayer, find_plan
from lightning_parstrat.distributed.fsdp.units import find_units, whole_parameters
from lightning_parstrat.distributed.fsdp.whole import let_be_copied
from lightning_parstrat.distributed.torch_compat import names_ignored_by_ddp, take_over_attributes


class Sharding(NamedTuple):
    """How a module is sharded.

    Attributes:
        groups: The groups of ranks that hold a copy each.
        place: The part that this rank holds.
        tensor_parallel_size: How many ranks share a tensor-parallel layer.
        planned: These layers.
        is_stuck: Whether FSDP2 cannot train the module again.
    """

    groups: ShardGroups
    place: ShardPlace
    tensor_parallel_size: int
    planned: list[PlannedLayer]
    is_stuck: bool = False


_SHARDED: "weakref.WeakKeyDictionary[nn.Module, Sharding]" = weakref.WeakKeyDictionary()


def module_sharding(module: nn.Module) -> Sharding | None:
    """How :func:`shard` has sharded a module. None if it has not."""
    return _SHARDED.get(module)


def note_exception(module: nn.Module) -> None:
    """Notes that an exception has ended a forward or backward that an older FSDP2 cannot forget. Not collective."""
    _SHARDED[module] = _SHARDED[module]._replace(is_stuck=True)


def check_sharding(module: nn.Module, groups: ShardGroups, tensor_parallel_size: int) -> Sharding:
    """How a sharded module is sharded. Not collective.

    Raises:
        ValueError: A training by such groups cannot use the module.
    """
    sharding = _SHARDED[module]
    if sharding.is_stuck:
        raise ValueError(
            "An exception has ended an earlier forward or backward of this module. FSDP2 of torch 2.12 and older cannot"
            " train it again: take torch 2.13 or newer, or make a new module, and load a checkpoint into it."
        )
    if (sharding.groups, sharding.tensor_parallel_size) != (groups, tensor_parallel_size):
        raise ValueError(
            f"The module is already sharded over groups of {sharding.groups.size} ranks, by"
            f" tensor_parallel_size={sharding.tensor_parallel_size}. This training has groups of {groups.size}, and"
            f" tensor_parallel_size={tensor_parallel_size}. Set the arguments of the earlier training. Or make a new"
            " module, and load a checkpoint into it."
        )
    return sharding


def shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    collectives: Collectives,
    device: torch.device,
    policy: FullShardingPolicy,
    by_child: bool,
) -> None:
    """Shards a module in place, for good. Its class becomes a subclass of FSDP2's. Collective.

    Args:
        module: On the host, on the device or on the meta device, which may differ by rank.
        group: The process group of all ranks.
        collectives: Of the ranks that hold the same parts of tensor-parallel layers. Their shard groups hold a copy of
            the module each.
        device: The device on which the module is to train.
        policy: Which modules are units, and whether they free their parameters between forward and backward.
        by_child: Whether training calls children of the root. Then no parameters of the root itself are gathered.

    Raises:
        ValueError: A tensor on the meta device cannot be made. Or the policy names no class of a
            module. Or the tensor-parallel plan cannot be carried out.
    """
    before = dict(module.named_parameters())
    units = find_units(module, policy.auto_wrap_policy or (), policy.min_num_params, by_child)
    whole = whole_parameters(module, units, by_child)
    size = policy.tensor_parallel_size
    planned = find_plan(module, size, whole) if size > 1 else []
    to_reset = _parts_without_values(module, whole, group, device)
    sharing, first = subgroup(collectives.group, collectives.mates), dist.get_rank() // size * size
    mesh = mesh_of(sharing, subgroup(group, range(first, first + size)) if size > 1 else None, device)
    names = {part: name for name, part in module.named_modules()}
    own, ignored_names = set(vars(module)), names_ignored_by_ddp(module)
    left = {one for n, one in (*module.named_parameters(), *module.named_buffers()) if n in ignored_names}
    # None: the root's parameters stay gathered from forward to backward, which follow each other at once.
    for part, reshards in [*((unit, policy.reshard_after_forward) for unit in units), (module, None)]:
        _make_on_device(part, whole, to_reset, left, group, device)
        # Gradients of a module's own shards in fp64 are summed in that, and all others in fp32.
        dtypes = {one.dtype for one in part.parameters() if one not in whole and not isinstance(one, DTensor)}
        summed_in = None if torch.float64 in dtypes else torch.float32
        precision = MixedPrecisionPolicy(reduce_dtype=summed_in, cast_forward_inputs=False)
        layers = set(part.modules())
        for one in [one for one in planned if one.layer in layers and not holds_shards(one.layer)]:
            one.cut(one.layer, mesh["tensor"])
        ignored = cast(Any, whole)
        fully_shard(
            part, mesh=mesh["data"], reshard_after_forward=reshards, mp_policy=precision, ignored_params=ignored
        )
        # Now, as this frees the memory of what was sharded.
        for name, parameter in part.named_parameters(names[part]):
            old = before.pop(name, parameter)
            if old is not parameter:
                take_over_attributes(old, parameter)
                refuse_uses(old)
    let_be_copied([*units, module], vars(module).keys() - own)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # On a GPU its forward sets `data` of parameters that are other objects than before: gathered ones.
            vars(part)["flatten_parameters"] = _leave_where_they_are
    _SHARDED[module] = Sharding(collectives.shard_groups, collectives.place, size, planned)


def mesh_of(sharing: dist.ProcessGroup, layers: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """The ranks that share parameters ("data"), by those that share layers ("tensor"), if any do. Collective."""
    if layers is None:
        return DeviceMesh.from_group(sharing, device.type, mesh_dim_names=("data",))
    ranks, beside = map(dist.get_process_group_ranks, (sharing, layers))
    rows = torch.tensor([[rank - dist.get_rank() + one for one in beside] for rank in ranks])
    return DeviceMesh.from_group([sharing, layers], device.type, mesh=rows, mesh_dim_names=("data", "tensor"))


def _leave_where_they_are() -> None:
    """In the place of ``flatten_parameters``, which saves cuDNN a copy of a recurrent layer's weights per call."""


class HeldParameter(nn.Parameter):
    """A former parameter of a module that is now sharded. Never instantiated: :func:`shard` swaps classes.

    A list, a closure or a callback may still hold the object. It has no values.
    """

    @classmethod
    @override
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "A parameter was used through an object from before the training. It has no values since the ranks have"
            " divided the module. Make optimizers in `configure_optimizers`. Elsewhere use the module's own attribute,"
            " such as `self.layer.weight`. It is whole in the `forward` of its block, or in `training_step` if it is in"
            " no block. All ranks may also enter `trainer.strategy.full_parameters()`."
        )


@torch.no_grad()
def refuse_uses(old: Tensor) -> None:
    """Makes every use of a module's former parameter raise, through whatever object holds it."""
    # Code in C++ does not ask the class: it finds a tensor whose memory was freed, and raises.
    old.data = torch.empty_like(old)
    old.untyped_storage().resize_(0)
    old.grad = None
    old.__class__ = HeldParameter


def _parts_without_values(
    module: nn.Module, whole: Collection[Tensor], group: dist.ProcessGroup, device: torch.device
) -> set[nn.Module]:
    """The parts that have no values on rank 0 yet: their ``reset_parameters`` is to be called on all ranks.

    Collective: eight bytes per part.

    Raises:
        ValueError: Such a part has no ``reset_parameters``, or only some ranks can shard a parameter. Raised on all
            ranks.
    """
    parts = list(module.modules())
    own = [dict((*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))) for part in parts]
    lacks = [dist.get_rank(group) == 0 and any(one.is_meta for one in tensors.values()) for tensors in own]
    kept_whole = [name for name, parameter in module.named_parameters() if parameter in whole]
    number = digest(kept_whole)
    combined = torch.tensor([*lacks, number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=group)
    *lacks, most, minus_least = combined.tolist()
    if most != -minus_least:
        raise ValueError(
            f"Some ranks can shard parameters that others cannot. This rank keeps whole: {listed(kept_whole)}. Make"
            " parameters contiguous, and without memory that they share, on all ranks."
        )
    found = [(part, tensors) for part, tensors, is_without in zip(parts, own, lacks, strict=True) if is_without]
    unmade = [(part, names) for part, names in found if not callable(getattr(part, "reset_parameters", None))]
    if unmade:
        shown = listed([f"{name} of {type(part).__name__}" for part, names in unmade for name in names])
        raise ValueError(
            f"On rank 0 these are on the meta device without values: {shown}. There is no method"
            " `reset_parameters` to give them some. Make the module on the host on rank 0 alone, and on the meta device"
            " on all other ranks; or define that method."
        )
    return {part for part, _ in found}


@torch.no_grad()
def _make_on_device(
    module: nn.Module,
    whole: set[Tensor],
    to_reset: Collection[nn.Module],
    left: Collection[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Brings tensors that are not sharded yet to a device, with rank 0's values. Collective.

    Every rank resets the parts in ``to_reset``, so that all random generators stay synchronized. Replacements of
    parameters in ``whole`` are added to it. Tensors in ``left`` keep each rank's values.

    Raises:
        ValueError: Such a tensor has no values.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        before = dict(part.named_parameters(recurse=False))
        tensors = [*before.values(), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            if any(tensor in left for tensor in tensors):
                raise ValueError(
                    f"{type(part).__name__} is on the meta device without values, and a name of it is in"
                    " `_ddp_params_and_buffers_to_ignore`, so that no rank gets another one's. Make it on the host."
                )
            part.to_empty(device=device, recurse=False)
            if part in to_reset:
                part.reset_parameters()  # type: ignore[operator]
            for own, parameter in before.items():
                # Making a module makes other parameters. Tied parameters must be tied again.
                setattr(part, own, replaced.setdefault(parameter, getattr(part, own)))
            whole.update(replaced[parameter] for parameter in before.values() if parameter in whole)
    tensors = [one for one in (*module.parameters(), *module.buffers()) if not isinstance(one, DTensor)]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    broadcast_tensors((tensor for tensor in tensors if tensor not in left), group)
