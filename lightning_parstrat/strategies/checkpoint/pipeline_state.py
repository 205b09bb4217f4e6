"""The state of a module whose ranks hold different stages, as checkpoints hold it."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.engine.state import gather_state_dict, grouped_parameters
from lightning_parstrat.distributed.engine.stepping import is_sharded, sharding_of
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
    def _held(self) -> HeldParts:
        parts = self._parts()
        if parts is None:
            raise AssertionError("the state of stages was asked for outside of a training")
        return parts

    @property
    def _group(self) -> Any:
        """The ranks of this rank's pipeline. The first one has rank 0 among them."""
        return subgroup(self._ranks.groups.control, self._ranks.grid.pipeline_of(self._ranks.rank))

    @override
    def of_module(self, saves_sharded: bool) -> dict[str, Any]:
        if self._ranks.data_rank:
            return {}
        return gather_module_state(self._strategy.lightning_module, self._held, self._group)

    @override
    def of_optimizer(self, optimizer: Optimizer, saves_sharded: bool) -> dict[str, Any]:
        parameters = list(grouped_parameters(optimizer))
        shards = sharding_of(optimizer).shards if is_sharded(optimizer) else None
        state = optimizer.state_dict() if shards is None else gather_state_dict(optimizer, shards)
        if self._ranks.data_rank:
            return {**state, "state": {}}
        return gather_optimizer_state(state, parameters, self._held, self._group)

    @override
    def own_part(self, optimizer: Optimizer, state: dict[str, Any], is_mapped: bool) -> dict[str, Any]:
        held = {number for number, parameter in enumerate(grouped_parameters(optimizer)) if has_memory(parameter)}
        # Copied: a checkpoint may be mapped from its file.
        own = {number: replace_leaves(one, torch.clone) for number, one in state["state"].items() if number in held}
        return {**state, "state": own}
