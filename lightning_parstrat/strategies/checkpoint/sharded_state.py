"""Checkpoints of sharded optimizers: gathered on rank 0 for a full one, described for a sharded one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.checkpoint.pieces import TensorSource
from lightning_parstrat.distributed.comm.liveness import missing_ranks_named
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer import ShardedOptimizer
from lightning_parstrat.distributed.zero1.state_dict import gather_state_dict
from lightning_parstrat.strategies.checkpoint.checkpoints import CHECKPOINT_KEY, CheckpointingStrategy
from lightning_parstrat.strategies.lightning_compat import unwrapped


class ShardedStateStrategy(CheckpointingStrategy):
    """Saves and loads optimizers of which each rank has a part."""

    _policy: ShardingPolicy
    """How buckets are planned."""
    _engine: ShardedDataParallel | None
    """Shards the optimizers while a training lasts."""
    _kept: dict[str, Any]
    """What is ours in the checkpoint that was loaded."""

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The unsharded state on rank 0 in torch's own format, on the host; elsewhere the groups alone. Collective.

        In a sharded checkpoint nothing is gathered: stand-ins are in the place of tensors.
        """
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, ShardedOptimizer):
            return super().optimizer_state(optimizer)
        if self._absent:
            return {"state": {}, "param_groups": []}
        with missing_ranks_named(self._liveness, "Gathering the optimizer's state"):
            self._wait_for_all()
            if not self._saves_sharded:
                return gather_state_dict(optimizer, destination=0)
            number = self._position_of(optimizer)

            def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
                source = TensorSource(number, position, entry)
                return self._placeholders.issue(slot.parameter.shape, slot.strides, dtype, source)

            return gather_state_dict(optimizer, destination=0, stand_in=stand_in)

    @property
    @override
    def _can_save_alone(self) -> bool:
        """No rank has all of the state."""
        return super()._can_save_alone and not any(isinstance(unwrapped(o), ShardedOptimizer) for o in self.optimizers)

    @override
    def _own_entries(self) -> dict[str, Any]:
        """The plan of the buckets: a resumed training sums gradients in the same order."""
        plan = {} if self._engine is None else {"bucket_plan": self._engine.plan, "planned_for": self._planned_for()}
        return {**super()._own_entries(), **plan}

    @override
    def _as_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A parameter is written as itself, not with the bucket it lies in."""
        saved: dict[str, Any] = checkpoint if self._engine is None else self._engine.with_own_storage(checkpoint)
        return saved

    @override
    def _sharded_slots(self) -> Mapping[Tensor, ParameterSlot]:
        return {} if self._engine is None else self._engine.slots

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint, and the bucket plan in it.

        A plan made for another world size or other arguments is left: what is asked for now counts.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._kept = checkpoint.get(CHECKPOINT_KEY, {})
        return checkpoint

    def _planned_for(self) -> dict[str, Any]:
        policy = self._policy
        return {
            "world_size": self.world_size,
            "bucket_cap_mb": policy.bucket_cap_mb,
            "bucket_order": policy.bucket_order,
        }

    def _kept_plan(self) -> list[list[str]]:
        """The buckets of the checkpoint that was loaded, where they would be planned for the same now."""
        return self._kept["bucket_plan"] if self._kept.get("planned_for") == self._planned_for() else []
