"""Whole states of sharded modules and optimizers in torch's own format, and their parts: tensor by tensor."""

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_have_same
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.engine.cuts import Run


def gather(value: Any, keep: bool) -> Any:
    """If it is kept, a tensor as a whole, copied to the host. A value that is no tensor is returned unchanged.

    Collective for sharded tensors: one all-gather. It needs memory for the whole tensor until that is on the host.

    Args:
        value: Any value.
        keep: Whether this rank needs the tensor.

    Returns:
        The whole tensor. If a sharded tensor is not kept, None.
    """
    if not isinstance(value, DTensor):
        # A copy, as for sharded tensors: a file's tensors do not change while it is written.
        is_here = isinstance(value, Tensor) and not value.is_meta
        return value.detach().cpu().clone() if is_here and keep else value
    whole = cast(DTensor, value.detach()).full_tensor()
    return whole.cpu() if keep else None


def holds_shards(value: object) -> bool:
    """Whether a value is a sharded tensor, or a module that has some."""
    if isinstance(value, nn.Module):
        return any(isinstance(parameter, DTensor) for parameter in value.parameters())
    return isinstance(value, DTensor)


@torch.no_grad()
def gather_module_state(module: nn.Module, keep: bool) -> dict[str, Any]:
    """If it is kept, the module's ``state_dict`` with whole tensors on the host, otherwise an empty one. Collective.

    A rank that keeps nothing never has more than one whole tensor. Tied parameters are gathered once, and stay tied.

    Args:
        module: Sharded by FSDP2.
        keep: Whether this rank needs the state.
    """
    tied = dict(module.named_parameters(remove_duplicate=False))
    gathered: dict[int, Any] = {}
    whole: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        number = id(tied.get(name, value))
        if number not in gathered:
            gathered[number] = gather(value, keep)
        if keep:
            whole[name] = gathered[number]
    return whole


@torch.no_grad()
def gather_optimizer_state(saved: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """An optimizer's state in torch's own format, with whole tensors on the host. If it is not kept, without state.

    Collective, as :func:`gather_module_state`. Placeholders on the meta device stay.

    Args:
        saved: The ``state_dict`` of an optimizer of a sharded module.
        keep: Whether this rank needs the state.
    """
    gather_leaves = functools.partial(replace_leaves, replacement=functools.partial(gather, keep=keep))
    whole: dict[Any, Any] = {}
    # In one order on all ranks, even if they made states in another order: by number, as torch counts parameters.
    for number in sorted(saved["state"], key=lambda key: (isinstance(key, str), key)):
        whole[number] = entries = saved["state"][number]
        if isinstance(entries, dict):
            gathered = {key: gather_leaves(entries[key]) for key in sorted(entries, key=str)}
            # The saved entries have the order of the optimizer's, as in a checkpoint of `ddp`.
            whole[number] = {key: gathered[key] for key in entries}
    return {**saved, "state": whole if keep else {}}


@torch.no_grad()
def gather_rest(tree: Any, keep: bool, control: Collectives) -> Any:
    """A copy of a tree with whole tensors on the host instead of sharded ones. Collective.

    Args:
        tree: Has sharded tensors in the same places on all ranks.
        keep: Whether this rank needs the whole tensors. On other ranks they are None.
        control: Compares these places: one small reduction.

    Raises:
        ValueError: Ranks have sharded tensors in different places. Raised on all of them.
    """
    paths = [leaf.path for leaf in leaves(tree) if isinstance(leaf.tensor, DTensor)]
    if not all_have_same(digest(paths), control):
        raise ValueError(
            "A hook has put shards of parameters into the checkpoint on some ranks only, or in other places. Put them"
            " in on all ranks, or `full_tensor()` of them, which all ranks call."
        )

    @functools.cache
    def whole(tensor: Tensor) -> Any:
        return gather(tensor, keep) if isinstance(tensor, DTensor) else tensor

    return replace_leaves(tree, whole)


def shard_like(value: Tensor | Run, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor, sharded as a parameter is. If the parameter is whole, a copy. Not collective.

    Args:
        value: The whole tensor, or this rank's part of it.
        parameter: A parameter of the whole tensor's shape.
    """
    if isinstance(value, Run):
        return with_own_part(value.elements, cast(DTensor, parameter))
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value.clone()
    whole = value.to(parameter.device)
    # Every rank has the whole: nothing is sent. A copy, so that the other ranks' parts can be freed.
    part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return with_own_part(part.to_local().clone(), parameter)


def with_own_part(elements: Tensor, parameter: DTensor) -> Tensor:
    """A DTensor, sharded as a parameter is, of which this rank's part is given. Not collective."""
    return DTensor.from_local(
        elements.view(parameter.to_local().shape).to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def shard_copy(copy: nn.Module, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives a copy of a module shards of rank 0's values, for the module's sharded parameters. Collective.

    Tied parameters stay tied. The copy then keeps weights, and cannot be called. It costs a broadcast for each
    parameter. Nothing happens to a copy of a sharded module.

    Args:
        copy: A copy of the module.
        module: Sharded by FSDP2.
        group: The process group of all ranks.
    """
    if holds_shards(copy):
        return
    let_whole_states_be_loaded(copy)
    shards: dict[Tensor, nn.Parameter] = {}
    for name, part in copy.named_modules():
        sharded = dict(module.get_submodule(name).named_parameters(recurse=False))
        for own, whole in list(part.named_parameters(recurse=False)):
            parameter = sharded[own]
            if not isinstance(parameter, DTensor):
                continue
            if whole not in shards:
                there = whole.detach().to(parameter.device, copy=True)
                broadcast_tensors([there], group)
                shards[whole] = nn.Parameter(shard_like(there, parameter), whole.requires_grad)
            setattr(part, own, shards[whole])


def let_whole_states_be_loaded(module: nn.Module) -> None:
    """Makes ``load_state_dict`` of a module, and of those below it, accept whole tensors for shards.

    Each rank keeps its part, so all ranks must load the same. Nothing is sent. Neither this nor loading is collective.

    Args:
        module: A module with sharded parameters, in which FSDP2 has its hooks by now.
    """
    for part in module.modules():
        part.register_load_state_dict_pre_hook(_take_own_parts)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _take_own_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not fits_parameter(value, parameter):
            # torch refuses a tensor of another shape.
            continue
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"`load_state_dict(..., assign=True)` would replace a shard by a whole tensor,"
                f" {prefix + name!r}. Leave `assign=True` out: values are then copied into the shards."
            )
        state[prefix + name] = shard_like(cast(Tensor, value), parameter)


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with this rank's parts instead of tensors of their parameter's shape.

    The given state has whole tensors, or this rank's parts. Not collective. Values that stay whole are copied.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identifiers = [identifier for group in state["param_groups"] for identifier in group["params"]]
    by_identifier = dict(zip(identifiers, parameters, strict=False))
    sharded = {}
    for identifier, entries in state["state"].items():
        parameter = by_identifier.get(identifier)
        if parameter is None or not isinstance(entries, Mapping):
            sharded[identifier] = replace_leaves(entries, torch.clone)
            continue
        sharded[identifier] = {
            key: shard_like(v, parameter) if fits_parameter(v, parameter) else replace_leaves(v, torch.clone)
            for key, v in entries.items()
        }
    return {**state, "state": sharded}


def fits_parameter(value: Any, parameter: Tensor) -> bool:
    """Whether a value is cut as its parameter is: a tensor of the parameter's shape, or this rank's part of one."""
    if isinstance(value, Run):
        return True
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
