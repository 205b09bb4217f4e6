"""ZeRO-1 for a module and its optimizers: buckets, reducer, gatherer and sharded optimizers, put together.

Every rank keeps all parameters, reduces gradients to the shard it owns, holds optimizer state and steps for that shard
alone, and gathers what the others stepped. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5.1 (optimizer state partitioning), with gradients reduce-scattered as in section 5.2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, Partition, fingerprint, plan_buckets
from lightning_parstrat.core.memory import owned_bytes, parameter_bytes
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.buckets import ParameterBucket
from lightning_parstrat.distributed.checks import check_agreement, check_parameters
from lightning_parstrat.distributed.collectives import ProcessGroups, make_collectives
from lightning_parstrat.distributed.exposure import full_gradients
from lightning_parstrat.distributed.gatherer import ParameterGatherer
from lightning_parstrat.distributed.optimizer import check_supported, shard_optimizer, unshard_optimizer
from lightning_parstrat.distributed.reducer import GradientReducer
from lightning_parstrat.distributed.sharding import OptimizerSharding, choose_partition, shard_existing_state
from lightning_parstrat.distributed.state_dict import with_own_storage
from lightning_parstrat.distributed.summary import ShardingSummary, state_bytes_per_parameter_byte


class ShardedDataParallel:
    """Shards the state of ``optimizers`` over all ranks.

    Creating it is collective: the ranks compare their plans. The module and the optimizers keep their identity; the
    parameters' storage moves into buckets (peak: one bucket more), the optimizers' classes are swapped. Closing it
    gives the parameters ordinary storage again.

    Args:
        module: The module; its parameters are the same on all ranks (see :func:`broadcast_module`).
        optimizers: Its optimizers; parameters in none of them are left alone.
        policy: How to bucket and partition.
        groups: The process groups.

    Raises:
        ValueError: Something cannot be sharded; the message says what and what to do.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], policy: ShardingPolicy, groups: ProcessGroups
    ) -> None:
        self.module = module
        self.policy = policy
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            check_supported(optimizer)
        parameters = [parameter for optimizer in self.optimizers for parameter in _parameters_of(optimizer)]
        check_parameters(module, parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.reducer = GradientReducer(
            make_collectives(groups.gradients, device), make_collectives(groups.control, torch.device("cpu"))
        )
        self.gatherer = ParameterGatherer(make_collectives(groups.parameters, device))
        self._shard_optimizers()

    @property
    def buckets(self) -> list[ParameterBucket]:
        """All buckets, in the order of their reductions."""
        return self.reducer.buckets

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates gradients locally and sends nothing."""
        with self.reducer.no_sync():
            yield

    @property
    def synchronizes(self) -> bool:
        """Whether a backward that began now would send gradients."""
        return self.reducer.synchronize

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Within it ``param.grad`` shows the mean gradients, to read or to change. Collective."""
        self.reducer.finish(self.buckets)
        if self.reducer.exposes_gradients:
            yield
            return
        with full_gradients(self.buckets, self.reducer.collectives):
            yield

    def prepare_backward(self, loss: Tensor) -> None:
        """Call before the backward of ``loss``, on all ranks. Parameters newly added to an optimizer are bucketed."""
        if any(_sharding_of(optimizer).has_added_parameters(optimizer) for optimizer in self.optimizers):
            self._adopt_added_parameters()
        self.reducer.prepare_backward(loss)

    def expose_gradients(self, wanted: bool) -> bool:
        """Shows reduced gradients in ``param.grad`` from now on where any rank wants them. Collective.

        Returns:
            Whether they will be shown, the same on all ranks: a callback may be there on one rank only.
        """
        flag = torch.tensor(int(wanted))
        self.reducer.control.all_reduce(flag, op=dist.ReduceOp.MAX).wait()
        self.reducer.exposes_gradients = bool(flag)
        return self.reducer.exposes_gradients

    def summary(self) -> ShardingSummary:
        """What was sharded, as this rank sees it."""
        layouts = [bucket.layout for bucket in self.buckets]
        rank = self.reducer.collectives.rank
        return ShardingSummary(
            parameters=sum(slot.numel for layout in layouts for slot in layout.slots),
            parameter_bytes=parameter_bytes(layouts),
            buckets=len(layouts),
            padding_bytes=sum(layout.padding * layout.itemsize for layout in layouts),
            owned_bytes=owned_bytes(layouts, rank),
            world_size=self.reducer.collectives.world_size,
            state_bytes=self._state_bytes(rank),
        )

    def with_own_storage(self, value: Any) -> Any:
        """A copy of nested dictionaries and lists in which tensors that lie in a bucket have storage of their own.

        A file that holds a view holds all of its storage: one small tensor would bring its whole bucket along.
        """
        storages = {bucket.flat.untyped_storage().data_ptr() for bucket in self.buckets}
        return with_own_storage(value, storages)

    def close(self) -> None:
        """Removes the hooks and gives the parameters ordinary storage again.

        Not collective, so that it may follow an exception on one rank. The optimizers stay sharded: their
        ``state_dict()`` still gathers the whole state, so that a checkpoint can be saved after training.
        """
        self.reducer.remove()
        for bucket in self.buckets:
            bucket.move_out()
        for optimizer in self.optimizers:
            _sharding_of(optimizer).attached = False

    def _state_bytes(self, rank: int) -> tuple[int, int] | None:
        whole = own = 0.0
        for optimizer in self.optimizers:
            ratio = state_bytes_per_parameter_byte(optimizer)
            if ratio is None:
                return None
            layouts = [bucket.layout for bucket in _sharding_of(optimizer).buckets]
            whole += ratio * parameter_bytes(layouts)
            own += ratio * owned_bytes(layouts, rank)
        return round(whole), round(own)

    def _shard_optimizers(self) -> None:
        earlier = [make_whole(optimizer) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            sharding = shard_optimizer(optimizer, self.reducer, self.gatherer)
            sharding.adopt_added_parameters = self._adopt_added_parameters
        self._bucket_parameters()
        for optimizer, state_dict in zip(self.optimizers, earlier, strict=True):
            if state_dict is not None:
                optimizer.load_state_dict(state_dict)
            else:
                shard_existing_state(optimizer, _sharding_of(optimizer))

    def _adopt_added_parameters(self) -> None:
        check_parameters(self.module, [p for optimizer in self.optimizers for p in _parameters_of(optimizer)])
        self._bucket_parameters()

    def _bucket_parameters(self) -> None:
        """Plans and creates buckets for all parameters that have none yet."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        position = {parameter: index for index, parameter in enumerate(names)}
        new = [
            (position.get(parameter, len(position)), parameter, number)
            for number, optimizer in enumerate(self.optimizers)
            for parameter in _parameters_of(optimizer)
            if parameter not in _sharding_of(optimizer).slots
        ]
        # Gradients become ready roughly in the reverse order of registration.
        new.sort(key=lambda item: -item[0])
        by_partition: dict[Partition, list[tuple[nn.Parameter, int]]] = {}
        for _, parameter, number in new:
            partition = choose_partition(self.optimizers[number], self.policy.partition)
            by_partition.setdefault(partition, []).append((parameter, number))
        for partition, members in sorted(by_partition.items()):
            self._create_buckets(partition, members, names)

    def _create_buckets(
        self, partition: Partition, members: list[tuple[nn.Parameter, int]], names: dict[nn.Parameter, str]
    ) -> None:
        parameters = [parameter for parameter, _ in members]
        specs = [
            ParameterSpec(
                name=names.get(parameter, "<not in the module>"),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
                itemsize=parameter.element_size(),
                group=(str(parameter.dtype), str(parameter.device), number),
            )
            for parameter, number in members
        ]
        layout_policy = LayoutPolicy(
            world_size=self.reducer.collectives.world_size,
            bucket_cap_bytes=self.policy.bucket_cap_bytes,
            partition=partition,
        )
        layouts = plan_buckets(specs, layout_policy)
        check_agreement(self.reducer.control, fingerprint(specs, layouts))
        owner = dict(members)
        buckets = [
            ParameterBucket(len(self.buckets) + index, layout, parameters, self.reducer.collectives.rank)
            for index, layout in enumerate(layouts)
        ]
        self.reducer.add_buckets(buckets)
        for bucket in buckets:
            _sharding_of(self.optimizers[owner[bucket.slots[0].parameter]]).add_buckets([bucket])


def make_whole(optimizer: Optimizer) -> dict[str, object] | None:
    """Undoes the sharding of an earlier training, if there was one. Collective.

    Returns:
        The optimizer's whole state, or None where it had not been sharded.
    """
    if "_sharding" not in vars(optimizer):
        return None
    state_dict = optimizer.state_dict()
    optimizer.state.clear()
    unshard_optimizer(optimizer)
    return state_dict


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sharding_of(optimizer: Optimizer) -> OptimizerSharding:
    sharding: OptimizerSharding = optimizer._sharding  # type: ignore[attr-defined]
    return sharding
