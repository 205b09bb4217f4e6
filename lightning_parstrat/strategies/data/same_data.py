"""Ranks that share layers, or a pipeline: they see the same batches, draw the same numbers, and count once."""

import inspect
import pickle
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import all_gather_object, broadcast_object
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.parts import Part


class SameData(Part):
    """Gives ranks with the same data the first one's batches. Metrics and sums are over one of them each.

    Ranks have the same data if they share tensor-parallel layers, or are stages of one pipeline.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
    """

    _of_one_training = frozenset({"_metrics"})

    def __init__(self, strategy: DDPStrategy, ranks: Ranks) -> None:
        super().__init__(strategy)
        self._ranks = ranks
        self.last_stage: int | None = None
        """The rank whose metrics count, among those with the same data. None if each has the same metrics."""
        self._metrics: list[tuple[Metric, bool]] = []
        """Metrics, and whether they keep what they compute."""

    @property
    def _is_alone(self) -> bool:
        return self._ranks.data_ranks == self._ranks.world_size

    @property
    def data_group(self) -> Any:
        """The process group of ranks with other data that do what this one does. Collective on first use."""
        return self._ranks.data_groups.gradients

    def begin(self) -> None:
        """Checks the training, and makes metrics count once. Not collective.

        Raises:
            MisconfigurationException: The ranks cannot be divided. Or a step draws its batches itself.
        """
        size = self._ranks.tensor_parallel_size
        if self._ranks.world_size % size:
            ranks = counted(self._ranks.world_size, "rank")
            raise MisconfigurationException(
                f"tensor_parallel_size={size} does not divide the {ranks} of this training. Start a multiple of {size}"
                " ranks, or set a divisor."
            )
        if self._is_alone:
            return
        if size > 1 and self._strategy.num_nodes > 1 and self._strategy.num_processes % size:
            rank_zero_warn(
                f"{self._ranks.flag}: some of the {size} ranks that share layers are on other nodes, and send"
                " activations in each layer. Set a divisor of the devices of a node"
                f" ({self._strategy.num_processes}) as tensor_parallel_size."
            )
        if "dataloader_iter" in inspect.signature(self._module.training_step).parameters:
            raise MisconfigurationException(
                f"{self._shares} get the same batch, and a `training_step` with `dataloader_iter` draws its own. Take"
                " `batch` and `batch_idx`."
            )
        self.count_once()

    def count_once(self) -> None:
        """Makes the module's metrics count ranks that share layers once. Not collective."""
        if self._is_alone:
            return
        for metric in (one for one in self._module.modules() if isinstance(one, Metric)):
            if metric.dist_sync_fn is None and metric.process_group is None:
                metric.dist_sync_fn = _GatherOfData(self)
                self._metrics.append((metric, metric.compute_with_cache))
                # On ranks of other stages no update would make it forget an old value.
                metric.compute_with_cache &= self._ranks.grid.pipeline == 1

    def of_last_stage(self, state: Tensor) -> Tensor:
        """A metric's state on the rank whose metrics count. Collective among ranks with the same data."""
        if self.last_stage is None:
            return state
        states: list[Tensor] = all_gather_object(state.detach().cpu(), self.group)
        return states[self.last_stage].to(state.device)

    @override
    def on_train_start(self) -> None:
        """Counts metrics once that were made since the set-up."""
        self.count_once()

    @override
    def on_evaluation_start(self) -> None:
        """Counts metrics once that were made since."""
        self.count_once()

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader. Compares the numbers of batches of ranks that share layers. Collective among them.

        Raises:
            MisconfigurationException: These numbers differ. Or a sampler divides the data among all ranks.
        """
        if self._is_alone:
            return dataloader
        sampler, ranks = getattr(dataloader, "sampler", None), self._ranks.data_ranks
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != ranks:
            raise MisconfigurationException(
                f"A DistributedSampler has num_replicas={sampler.num_replicas}, and {ranks} is right, as {self._shares}"
                " have the same data. Make it by `**trainer.distributed_sampler_kwargs`."
            )
        lengths = set(all_gather_object(sized_len(dataloader), self.group))
        if len(lengths) > 1:
            raise MisconfigurationException(
                f"{self._shares.capitalize()} have loaders of {', '.join(map(str, sorted(lengths, key=str)))} batches."
                " They see the same batches: divide data by `trainer.distributed_sampler_kwargs`, not by world size."
            )
        return dataloader

    @property
    def _shares(self) -> str:
        size = self._ranks.tensor_parallel_size
        return f"ranks that share layers (tensor_parallel_size={size})" if size > 1 else "the ranks of a pipeline"

    @property
    def group(self) -> Any:
        """The ranks with this one's data. Messages are in host memory. Collective on first use."""
        return subgroup(self._ranks.groups.control, self._ranks.grid.with_same_data(self._ranks.rank))

    @torch.no_grad()
    def share(self, batch: Any) -> Any:
        """The batch of the first of the ranks that share layers, whose random numbers all of them continue.

        Collective among them: the batch's bytes, and 10 KB. Tensors are on the host.

        Raises:
            TypeError: The batch cannot be pickled. Raised on all of them.
        """
        if self._is_alone:
            return batch
        is_first = self._ranks.rank == self._ranks.grid.with_same_data(self._ranks.rank)[0]
        packed, tensors, fault = _pack(batch) if is_first else (b"", [], "")
        packed, fault, state = broadcast_object((packed, fault, rng_state()), self.group)
        if fault:
            raise TypeError(
                f"{self._shares.capitalize()} get the first one's batch, and it cannot be pickled: {fault}. Return"
                " tensors in dictionaries, lists or tuples."
            )
        set_rng_state(state)

        def make(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            return tensors[-1]

        shared = batch if is_first else replace_leaves(pickle.loads(packed), make)
        # Gloo does not know all dtypes.
        broadcast_tensors([tensor.view(-1).view(torch.uint8) for tensor in tensors], self.group)
        return shared

    @override
    def teardown(self) -> None:
        """Gives metrics their own way to synchronize again."""
        for metric, keeps in self._metrics or ():
            metric.dist_sync_fn, metric.compute_with_cache = None, keeps
        self._metrics = []


class _GatherOfData:
    """A metric's ``dist_sync_fn``: gathers from ranks that have different data. Copies of a metric share it.

    Args:
        ranks: Knows these ranks.
    """

    def __init__(self, ranks: SameData) -> None:
        self._ranks = ranks

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """Gathers a state. Collective."""
        result = self._ranks.of_last_stage(result)
        return gather_all_tensors(result, self._ranks.data_group if group is None else group)

    def __deepcopy__(self, _: object) -> "_GatherOfData":
        """Returns itself: a process group has no copy."""
        return self

    def __reduce__(self) -> Any:
        """Pickled as None, as another process has other ranks."""
        return type(None), ()


def _pack(batch: Any) -> tuple[bytes, list[Tensor], str]:
    """A batch without the values of its tensors, pickled, and its tensors. Or what is wrong with it."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or not tensor.numel():
            return tensor
        tensors.append(tensor.detach().cpu().contiguous())
        return tensors[-1].to("meta")

    try:
        try:
            return pickle.dumps(replace_leaves(batch, take)), tensors, ""
        except (TypeError, ValueError, RuntimeError):
            # Such as a packed sequence, a named tuple that cannot be made of other tensors.
            return pickle.dumps(batch), [], ""
    except Exception as error:
        return b"", [], f"{type(error).__name__}: {error}"
