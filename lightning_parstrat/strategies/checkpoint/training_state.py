"""The state of a module and its optimizers, as checkpoints hold it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import replace_leaves, with_own_storage
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.checkpoint.tensors import WrittenTensors, name_of_state, placeholder
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.engine.cuts import Cut, cuts_in_buckets
from lightning_parstrat.distributed.engine.state import gather_state_dict
from lightning_parstrat.distributed.engine.stepping import OptimizerSharding, is_sharded, sharding_of
from lightning_parstrat.strategies.lightning_compat import unwrapped
from lightning_parstrat.strategies.parts import Part


class TrainingState(Part):
    """The state of a module that every rank has whole, and of optimizers that may be sharded.

    Args:
        strategy: The strategy with the module and the optimizers.
    """

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
        number = self.optimizers.index(optimizer)

        def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
            return placeholder(slot.parameter.shape, slot.strides, dtype, name_of_state(number, position, entry))

        return gather_state_dict(optimizer, sharding_of(optimizer).shards, stand_in=stand_in if saves_sharded else None)

    def completed(self, checkpoint: dict[str, Any], gathers: bool) -> dict[str, Any]:
        """A checkpoint whose entries from hooks are whole, too. Collective if it ``gathers``."""
        return checkpoint

    def with_own_storage(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with tensors in separate storages. A parameter shares the storage of a bucket with others."""
        storages = {address for one in self._shardings if one.attached for b in one.buckets for address in b.storages}
        return with_own_storage(checkpoint, storages) if storages else checkpoint

    def tensors(self) -> WrittenTensors:
        """The tensors of a sharded checkpoint, and which part of each a rank writes."""
        cuts = {None: self._cuts_of_parameters(), **{n: self.cuts_of(one) for n, one in enumerate(self.optimizers)}}
        return WrittenTensors(self._written_parameters(), self.optimizers, cuts)

    def filled(self, loaded: ShardedCheckpoint) -> dict[str, Any]:
        """The content of a sharded checkpoint, without the optimizers' tensors."""
        states = {key: value for key, value in loaded.skeleton.items() if key == "optimizer_states"}
        rest = {key: value for key, value in loaded.skeleton.items() if key not in states}
        cuts: dict[Any, Cut] = {("state_dict", name): cut for name, cut in self._cuts_of_weights().items()}
        return {**loaded.filled(rest, cuts.get), **states}

    def own_part(self, optimizer: Optimizer, state: dict[str, Any], is_mapped: bool) -> dict[str, Any]:
        """The state that this rank gives to an optimizer, of a loaded state in torch's own format.

        Args:
            optimizer: The user's optimizer.
            state: The loaded state, with whole tensors or this rank's parts.
            is_mapped: Whether its tensors are mapped from a file.
        """
        if is_sharded(optimizer) or not is_mapped:
            return state
        # Steps in place on mapped tensors would copy each page on its first write, and keep the file open.
        return replace_leaves(state, torch.clone)

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
