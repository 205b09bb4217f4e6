"""The state of a module that FSDP2 has sharded, as checkpoints hold it."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.engine.cuts import Cut, Run, cuts_in_rows
from lightning_parstrat.distributed.engine.state import grouped_parameters
from lightning_parstrat.distributed.fsdp.sharding import module_sharding
from lightning_parstrat.distributed.fsdp.state import (
    gather_module_state,
    gather_optimizer_state,
    gather_rest,
    holds_shards,
    shard_like,
    shard_optimizer_state,
)
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import averaged_copies


class FullyShardedState(TrainingState):
    """The state of a module of which each rank has shards, and of its optimizers.

    Args:
        strategy: The strategy with the module and the optimizers.
        ranks: The strategy's ranks.
        free: Frees parameters that are gathered, and checks what was written to them.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, free: Callable[[], None]) -> None:
        super().__init__(strategy)
        self._ranks, self._free = ranks, free

    @override
    def is_sharded(self, optimizer: Optimizer) -> bool:
        return True

    @property
    @override
    def is_whole(self) -> bool:
        # From the module, because it stays sharded when the training has ended.
        return module_sharding(self._module) is None

    @override
    def of_module(self, saves_sharded: bool) -> dict[str, Any]:
        self._free()
        if saves_sharded:
            return self._module.state_dict()
        return gather_module_state(self._module, self._strategy.is_global_zero)

    @override
    def of_optimizer(self, optimizer: Optimizer, saves_sharded: bool) -> dict[str, Any]:
        state = optimizer.state_dict()
        if saves_sharded:
            state = self.tensors().with_placeholders(state)
        return gather_optimizer_state(state, self._strategy.is_global_zero)

    @override
    def completed(self, checkpoint: dict[str, Any], gathers: bool) -> dict[str, Any]:
        checkpoint = _without_sharded_hyperparameters(checkpoint)
        if not gathers:
            return checkpoint
        return gather_rest(checkpoint, self._strategy.is_global_zero, self._ranks.control)

    @override
    def filled(self, loaded: ShardedCheckpoint) -> dict[str, Any]:
        filled, named = super().filled(loaded), dict(self._module.named_parameters(remove_duplicate=False))
        parts = {name: part for name, part in filled["state_dict"].items() if isinstance(part, Run)}
        filled["state_dict"].update({name: shard_like(part, named[name]) for name, part in parts.items()})
        return filled

    @override
    def own_part(self, optimizer: Optimizer, state: dict[str, Any], is_mapped: bool) -> dict[str, Any]:
        return shard_optimizer_state(optimizer, state)

    @override
    def cuts_of(self, optimizer: Optimizer) -> Mapping[Tensor, Cut]:
        return cuts_in_rows(grouped_parameters(optimizer), module_sharding(self._module).place)

    @override
    def _cuts_of_parameters(self) -> Mapping[Tensor, Cut]:
        return cuts_in_rows(self._written_parameters().values(), module_sharding(self._module).place)

    @override
    def _written_parameters(self) -> Mapping[str, Tensor]:
        # Averages are cut in the same way as the module.
        copies = enumerate(averaged_copies(self._module.trainer))
        averages = {f"average {n}/{name}": one for n, copy in copies for name, one in copy.named_parameters()}
        return {**super()._written_parameters(), **averages}

    @override
    def _cuts_of_weights(self) -> Mapping[str, Cut]:
        # Before its setup, a module is whole, and takes whole weights.
        if self.is_whole:
            return {}
        self._free()
        named, cuts = self._module.named_parameters(remove_duplicate=False), self._cuts_of_parameters()
        return {name: cuts[parameter] for name, parameter in named if parameter in cuts}


def _without_sharded_hyperparameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Leaves out sharded modules, because their classes exist in this process alone. The state has their weights."""
    for key in (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY):
        held = checkpoint.get(key)
        if isinstance(held, dict):
            kept = {name: value for name, value in held.items() if not holds_shards(value)}
            checkpoint = {**checkpoint, key: kept}
    return checkpoint
