"""The state of a module whose ranks hold different stages, as checkpoints hold it."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.engine.state import gather_state_dict, grouped_parameters
from lightning_parstrat.distributed.engine.stepping import is_sharded, sharding_of
from lightning_parstrat.distributed.fsdp import state as fsdp_state
from lightning_parstrat.distributed.pipeline.holders import HeldParts
from lightning_parstrat.distributed.pipeline.state import gather_module_state, gather_optimizer_state
from lightning_parstrat.distributed.torch_compat import has_memory
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
        return not self.is_whole

    @property
    @override
    def is_whole(self) -> bool:
        return self._parts() is None

    @property
    def _is_first(self) -> bool:
        """Whether this rank is in the pipeline of rank 0."""
        return 0 in self._ranks.grid.pipeline_of(self._ranks.rank)

    @property
    def _group(self) -> Any:
        """The ranks of this rank's pipeline. The first one has rank 0 among them."""
        return subgroup(self._ranks.groups.control, self._ranks.grid.pipeline_of(self._ranks.rank))

    @override
    def of_module(self, saves_sharded: bool) -> dict[str, Any]:
        module, keeps = self._strategy.lightning_module, self._is_first
        if self._parts().sharded is None:
            state = module.state_dict() if keeps else {}
        else:
            state = fsdp_state.gather_module_state(module, keeps)
        return gather_module_state(module, state, self._parts(), self._group) if keeps else {}

    @override
    def of_optimizer(self, optimizer: Optimizer, saves_sharded: bool) -> dict[str, Any]:
        parameters, keeps = list(grouped_parameters(optimizer)), self._is_first
        if is_sharded(optimizer):
            state = gather_state_dict(optimizer, sharding_of(optimizer).shards)
        elif self._parts().sharded is not None:
            state = fsdp_state.gather_optimizer_state(optimizer.state_dict(), keeps)
        else:
            state = optimizer.state_dict()
        if not keeps:
            return {**state, "state": {}}
        return gather_optimizer_state(state, parameters, self._parts(), self._group)

    @override
    def own_part(self, optimizer: Optimizer, state: dict[str, Any], is_mapped: bool) -> dict[str, Any]:
        held = {number for number, parameter in enumerate(grouped_parameters(optimizer)) if has_memory(parameter)}
        own = {number: one for number, one in state["state"].items() if number in held}
        # Copied: a checkpoint may be mapped from its file.
        return fsdp_state.shard_optimizer_state(optimizer, {**state, "state": own})
