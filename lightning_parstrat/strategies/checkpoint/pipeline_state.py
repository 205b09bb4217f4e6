"""The state of a module whose ranks hold different stages, as checkpoints hold it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.engine.state import grouped_parameters
from lightning_parstrat.distributed.pipeline.holders import HeldParts, has_memory
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.launch.ranks import Ranks


class PipelineState(TrainingState):
    """The state of a module of which each rank holds its stages, and of its optimizers.

    Args:
        strategy: The strategy with the module and the optimizers.
        ranks: The strategy's ranks.
        parts: Returns what this rank holds. None outside of a training.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, parts: Callable[[], HeldParts | None]) -> None:
        super().__init__(strategy)
        self._ranks, self._parts = ranks, parts

    @override
    def is_sharded(self, optimizer: Optimizer) -> bool:
        return self._parts() is not None

    @property
    @override
    def is_whole(self) -> bool:
        return self._parts() is None

    @override
    def of_module(self, saves_sharded: bool) -> dict[str, Any]:
        parts, module = self._parts(), self._strategy.lightning_module
        if parts is None or module is None:
            raise AssertionError("the state of a pipeline was asked for outside of a training")
        state: dict[str, Any] = module.state_dict()
        # `state_dict` detaches: the holders are known of the module's own tensors.
        named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
        for name in state:
            tensor = named.get(name)
            if tensor is not None and tensor in parts.ranks_of:
                state[name] = self._from(parts.ranks_of[tensor][0], tensor.detach(), self._ranks.control.group)
        return state if self._strategy.is_global_zero else {}

    def _from(self, holder: int, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Rank 0's copy on the host of a tensor that another rank holds. Elsewhere the tensor. Collective between both."""
        rank = dist.get_rank(group)
        if rank == 0 != holder:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(received, group=group, group_src=holder)
            return received
        if rank == holder != 0:
            dist.send(tensor.cpu().contiguous(), group=group, group_dst=0)
        return tensor.cpu() if rank == 0 else tensor

    @override
    def of_optimizer(self, optimizer: Optimizer, saves_sharded: bool) -> dict[str, Any]:
        parts = self._parts()
        state = optimizer.state_dict()
        if parts is None:
            return state
        group = self._ranks.control.group
        numbers = {number: one for number, one in enumerate(grouped_parameters(optimizer))}
        own = {number: entries for number, entries in state["state"].items() if parts.counts(numbers[number])}
        told = all_gather_object(replace_leaves(own, lambda one: one.to("meta") if one.numel() > 1 else one.cpu()), group)
        for holder, entries in enumerate(told):
            # In one order on both ranks.
            for number in sorted(entries):
                for key in sorted(entries[number], key=str):
                    value = own[number][key] if number in own else entries[number][key]
                    given = entries[number][key]
                    if isinstance(given, Tensor) and given.is_meta:
                        value = self._from(holder, value.detach(), group)
                    entries[number][key] = value
        if not self._strategy.is_global_zero:
            return {**state, "state": {}}
        return {**state, "state": {number: entries for one in told for number, entries in one.items()}}

    @override
    def own_part(self, optimizer: Optimizer, state: dict[str, Any], is_mapped: bool) -> dict[str, Any]:
        numbers = enumerate(grouped_parameters(optimizer))
        held = {number for number, parameter in numbers if has_memory(parameter)}
        own = {number: replace_leaves(entries, torch.clone) for number, entries in state["state"].items() if number in held}
        return {**state, "state": own}

