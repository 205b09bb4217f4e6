"""The state of a module and its optimizers, as checkpoints hold it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.core.tensor_trees import replace_leaves, with_own_storage
from lightning_parstrat.distributed.checkpoint.pieces import CheckpointPieces, TensorSource, placeholder
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.engine.cuts import cuts_in_buckets
from lightning_parstrat.distributed.engine.state import StandIn, gather_state_dict
from lightning_parstrat.distributed.engine.stepping import OptimizerSharding, is_sharded, sharding_of
from lightning_parstrat.strategies.lightning_compat import unwrapped


class TrainingState:
    """The state of a module that every rank has whole, and of optimizers that may be sharded.

    Args:
        strategy: The strategy with the module and the optimizers.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, in their order."""
        return [unwrapped(one) for one in self._strategy.optimizers]

    def is_sharded(self, optimizer: Optimizer) -> bool:
        """Whether each rank has only a part of an optimizer's state."""
        return is_sharded(optimizer)

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the whole module."""
        return True

    @property
    def is_on_every_rank(self) -> bool:
        """Whether each rank has the whole state."""
        return self.is_whole and not any(map(is_sharded, self.optimizers))

    def of_module(self, saves_sharded: bool) -> dict[str, Any]:
        """The state of a module that is not whole. Collective.

        Args:
            saves_sharded: Whether the shards are not gathered.
        """
        raise NotImplementedError

    def of_optimizer(self, optimizer: Optimizer, saves_sharded: bool) -> dict[str, Any]:
        """The state of a sharded optimizer: on rank 0's host in torch's own format, on other ranks the groups.

        Collective.

        Args:
            optimizer: The user's optimizer.
            saves_sharded: Whether the shards are not gathered, and placeholders take the place of tensors.
        """
        stand_in = self._stand_in_for(optimizer) if saves_sharded else None
        return gather_state_dict(optimizer, sharding_of(optimizer).shards, stand_in=stand_in)

    def _stand_in_for(self, optimizer: Optimizer) -> StandIn:
        number = self.optimizers.index(optimizer)

        def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
            return placeholder(slot.parameter.shape, slot.strides, dtype, TensorSource(number, position, entry))

        return stand_in

    def completed(self, checkpoint: dict[str, Any], gathers: bool) -> dict[str, Any]:
        """A checkpoint whose entries from hooks are whole, too. Collective if it ``gathers``."""
        return checkpoint

    def with_own_storage(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with tensors in separate storages. A parameter shares the storage of a bucket with others."""
        storages = {address for one in self._shardings if one.attached for b in one.buckets for address in b.storages}
        saved: dict[str, Any] = with_own_storage(checkpoint, storages) if storages else checkpoint
        return saved

    def pieces(self) -> CheckpointPieces:
        """Which rank writes which part of a sharded checkpoint."""
        cuts = {None: self._cuts_of_parameters(), **{n: self.cuts_of(one) for n, one in enumerate(self.optimizers)}}
        return CheckpointPieces(self._written_parameters(), self.optimizers, cuts, self._groups_with_a_copy)

    def filled(self, loaded: ShardedCheckpoint) -> dict[str, Any]:
        """The content of a sharded checkpoint, without the optimizers' tensors. Collective."""
        states = {key: value for key, value in loaded.skeleton.items() if key == "optimizer_states"}
        rest = {key: value for key, value in loaded.skeleton.items() if key not in states}
        cuts: dict[Any, Cut] = {("state_dict", name): cut for name, cut in self._cuts_of_weights().items()}
        return {**loaded.filled(rest, cuts.get), **states}

    def own_part(
        self, optimizer: Optimizer, state: dict[str, Any], read: Callable[[dict[str, Any]], dict[str, Any]] | None
    ) -> dict[str, Any]:
        """The state that this rank gives to an optimizer, of a loaded state.

        Args:
            optimizer: The user's optimizer.
            state: The loaded state in torch's own format.
            read: Reads this rank's part of a sharded checkpoint's state. None if ``state`` has the tensors.
        """
        if read is not None:
            return read(state)
        if is_sharded(optimizer):
            return state
        # Steps in place on mapped tensors would copy each page on its first write, and keep the file open.
        copied: dict[str, Any] = replace_leaves(state, torch.clone)
        return copied

    def cuts_of(self, optimizer: Optimizer) -> Mapping[Tensor, Cut]:
        """How an optimizer's state is cut, by its parameters. Other parameters' state is whole on every rank."""
        return cuts_in_buckets(sharding_of(optimizer).slots) if is_sharded(optimizer) else {}

    def _written_parameters(self) -> Mapping[str, Tensor]:
        """Parameters that all ranks write together, as each has all or a part of them. Names are the same on all."""
        module = self._strategy.lightning_module
        return {} if module is None else dict(module.named_parameters())

    def _cuts_of_parameters(self) -> Mapping[Tensor, Cut]:
        """How ranks divide these parameters, if the optimizers have sharded them."""
        return cuts_in_buckets({p: slot for one in self._shardings if one.attached for p, slot in one.slots.items()})

    def _cuts_of_weights(self) -> Mapping[str, Cut]:
        """How weights are cut, by their names in the checkpoint, if this rank loads only its part of them."""
        return {}

    @property
    def _shardings(self) -> list[OptimizerSharding]:
        return [sharding_of(one) for one in self.optimizers if is_sharded(one)]

    @property
    def _groups_with_a_copy(self) -> Sequence[Sequence[int]]:
        """For each copy of the sharded state, the ranks that hold it together, in the order of their shards."""
        # From the optimizers, because they stay sharded when the training has ended.
        groups = (sharding.shard_groups.groups for sharding in self._shardings if sharding.buckets)
        return next(groups, (range(self._strategy.world_size),))
