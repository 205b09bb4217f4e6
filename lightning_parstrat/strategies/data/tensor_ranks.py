"""Ranks that share tensor-parallel layers: they see the same batches, draw the same numbers, and count once."""

import inspect
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import broadcast_object
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.parts import Part


class TensorRanks(Part):
    """Gives the ranks that share layers the first one's batches. Metrics and sums are over one of them each.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
    """

    _of_one_training = frozenset({"_metrics"})

    def __init__(self, strategy: DDPStrategy, ranks: Ranks) -> None:
        super().__init__(strategy)
        self._ranks = ranks
        self._metrics: list[Metric] = []

    @property
    def _size(self) -> int:
        return self._ranks.tensor_parallel_size

    @property
    def data_group(self) -> Any:
        """The process group of this rank, and of one of each other ranks that share layers. Collective on first use."""
        members = range(self._ranks.rank % self._size, self._ranks.world_size, self._size)
        return subgroup(self._ranks.groups.gradients, members)

    def begin(self) -> None:
        """Checks the training, and makes metrics count once. Not collective.

        Raises:
            MisconfigurationException: The ranks cannot be divided. Or a step draws its batches itself.
        """
        if self._size == 1:
            return
        if self._ranks.world_size % self._size:
            ranks = counted(self._ranks.world_size, "rank")
            raise MisconfigurationException(
                f"tensor_parallel_size={self._size} does not divide the {ranks} of this training. Start a multiple of"
                f" {self._size} ranks, or set a divisor."
            )
        if "dataloader_iter" in inspect.signature(self._module.training_step).parameters:
            raise MisconfigurationException(
                f"tensor_parallel_size={self._size} gives ranks that share layers the same batch, and a `training_step`"
                " with `dataloader_iter` draws its own. Take `batch` and `batch_idx`."
            )
        found = (one for one in self._module.modules() if isinstance(one, Metric) and one.process_group is None)
        self._metrics = list(found)
        for metric in self._metrics:
            metric.process_group = self.data_group

    @torch.no_grad()
    def share(self, batch: Any) -> Any:
        """The batch of the first of the ranks that share layers, whose random numbers all of them continue.

        Collective among them: the batch's bytes, and 10 KB. Tensors are on the host.
        """
        if self._size == 1:
            return batch
        first = self._ranks.rank // self._size * self._size
        group = subgroup(self._ranks.groups.control, range(first, first + self._size))
        skeleton = replace_leaves(batch, lambda tensor: tensor.to("meta")) if self._ranks.rank == first else None
        skeleton, state = broadcast_object((skeleton, rng_state()), group)
        set_rng_state(state)
        shared = replace_leaves(batch if self._ranks.rank == first else skeleton, _on_host)
        broadcast_tensors([leaf.tensor for leaf in leaves(shared)], group)
        return shared

    @override
    def teardown(self) -> None:
        """Gives metrics their own process group again."""
        for metric in self._metrics or ():
            metric.process_group = None
        self._metrics = []


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()
