"""The state of a module that is cut into stages, and of its optimizers, gathered on rank 0."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.pipeline.holders import HeldParts, in_state_dict


@torch.no_grad()
def gather_module_state(
    module: nn.Module, own: dict[str, Any], parts: HeldParts, control: dist.ProcessGroup
) -> dict[str, Any]:
    """The module's state dict on rank 0's host, nothing elsewhere. Collective: each rank sends what it holds.

    Args:
        module: The module.
        own: Its state on this rank.
        parts: What this rank holds of it.
        control: The ranks of the pipeline. Messages are in host memory.
    """
    named = module.named_parameters(remove_duplicate=False)
    first: dict[str, int] = {in_state_dict(name): parts.ranks_of[parameter][0] for name, parameter in named}
    first = {**parts.holders_of_buffers(control), **first}
    rank, state = dist.get_rank(control), dict(own)
    held = {name: one for name, one in own.items() if isinstance(one, Tensor) and first.get(name, 0) == rank}
    # A block's forward may have made buffers, or others than those that rank 0 has.
    for holder, outline in enumerate(all_gather_object(replace_leaves(held, _outline), control)):
        for name, one in outline.items():
            state[name] = _on_first(held.get(name, one), holder, control) if one.is_meta else one
    return state if rank == 0 else {}


def gather_optimizer_state(
    state: dict[str, Any], parameters: Sequence[Tensor], parts: HeldParts, control: dist.ProcessGroup
) -> dict[str, Any]:
    """The state of an optimizer in torch's own format on rank 0's host, elsewhere its groups. Collective.

    Args:
        state: Its state on this rank.
        parameters: Its parameters, in the order of their numbers.
        parts: What this rank holds of the module.
        control: The ranks of the pipeline. Messages are in host memory.
    """
    own = {number: entries for number, entries in state["state"].items() if parts.counts(parameters[number])}
    outlines = all_gather_object(replace_leaves(own, _outline), control)
    gathered: dict[int, Any] = {}
    for holder, outline in enumerate(outlines):
        for number, entries in outline.items():
            mine = own.get(number, entries)
            gathered[number] = {
                key: _on_first(mine[key], holder, control) if isinstance(value, Tensor) and value.is_meta else value
                for key, value in entries.items()
            }
    return {**state, "state": dict(sorted(gathered.items())) if dist.get_rank(control) == 0 else {}}


def _outline(tensor: Tensor) -> Tensor:
    # Counts of steps travel with the outline.
    return tensor.detach().to("meta") if tensor.numel() > 1 else tensor.detach().cpu()


def _on_first(tensor: Tensor, holder: int, control: dist.ProcessGroup) -> Tensor:
    """Rank 0's copy on the host of a tensor that another rank holds. Collective between both."""
    rank = dist.get_rank(control)
    if rank == holder and rank > 0:
        dist.send(tensor.detach().cpu().contiguous(), group=control, group_dst=0)
    if rank == 0 and holder > 0:
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(received, group=control, group_src=holder)
        return received
    return tensor.detach().cpu() if rank == 0 else tensor
