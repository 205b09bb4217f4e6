"""ZeRO-1 for a module and its optimizers: buckets, reducer, gatherer and sharded optimizers, put together.

Every rank keeps all parameters, reduces gradients to the shard it owns, holds optimizer state and steps for that shard
alone, and gathers what the others stepped. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5.1 (optimizer state partitioning), with gradients reduce-scattered as in section 5.2.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, Partition, fingerprint, plan_buckets
from lightning_parstrat.core.memory import owned_bytes, parameter_bytes
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.buckets import ParameterBucket
from lightning_parstrat.distributed.collectives import Collectives, ProcessGroups, make_collectives
from lightning_parstrat.distributed.exposure import full_gradients
from lightning_parstrat.distributed.gatherer import ParameterGatherer
from lightning_parstrat.distributed.optimizer import (
    OptimizerSharding,
    check_supported,
    choose_partition,
    shard_existing_state,
    shard_optimizer,
    state_bytes_per_parameter_byte,
    unshard_optimizer,
)
from lightning_parstrat.distributed.reducer import GradientReducer


class ShardingSummary(NamedTuple):
    """What was sharded, for a line to the user."""

    parameters: int
    parameter_bytes: int
    buckets: int
    padding_bytes: int
    owned_bytes: int
    world_size: int
    state_bytes: tuple[int, int] | None
    """Optimizer state unsharded and on this rank, where it can be told before the first step."""


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
        return _with_own_storage(value, storages)

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


def check_parameters(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuses parameters that cannot be bucketed, before anything is moved.

    Raises:
        ValueError: Several devices, a dtype without gradients, or a module that makes sparse gradients.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the optimizers are on several devices: {devices}. Each rank must hold all of them on"
            " one: leave the placement to the Trainer, or use a model-parallel strategy."
        )
    seen: set[Tensor] = set()
    for parameter in parameters:
        name = names.get(parameter, "<not in the module>")  # type: ignore[call-overload]
        if parameter in seen:
            raise ValueError(
                f"Parameter {name!r} is in more than one optimizer, so that two shards would own it. Give each"
                " parameter to one optimizer, or use `strategy='ddp'`."
            )
        seen.add(parameter)
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"Parameter {name!r} is of {parameter.dtype}; only floating point and complex parameters can be"
                " trained. Register it as a buffer instead."
            )
        if parameter.layout != torch.strided:
            raise ValueError(f"Parameter {name!r} has layout {parameter.layout}; only dense ones can be sharded.")
    _check_overlap(parameters, names)
    trained = set(parameters)
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight in trained:
            raise ValueError(
                f"{type(child).__name__} {name!r} makes sparse gradients, and only dense ones can be sharded."
                " Use `sparse=False`, or `strategy='ddp'`."
            )


def _check_overlap(parameters: Sequence[Tensor], names: Mapping[Any, str]) -> None:
    """Two parameters over the same memory would each get a place of their own, and part from each other."""
    extents = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, names.get(parameter, "<not in the module>"))
        for parameter in parameters
        if parameter.numel() and parameter.device.type != "meta" and _is_dense(parameter)
    )
    for (_, end, name), (start, _, other) in pairwise(extents):
        if start < end:
            raise ValueError(
                f"Parameters {name!r} and {other!r} share memory without being the same nn.Parameter, which sharding"
                " would undo. Tie them by assigning the same nn.Parameter to both modules."
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def check_agreement(control: Collectives, number: int) -> None:
    """Compares a number over all ranks. Collective; one all-reduce of 16 bytes.

    Raises:
        ValueError: The ranks have different numbers, that is, different parameters or plans.
    """
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    if extremes[0] != -extremes[1]:
        raise ValueError(
            "The ranks do not have the same parameters in the same order, so they cannot share their optimizer state."
            " Build the same module and the same optimizers on every rank (check code that depends on the rank)."
        )


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies tensors from one rank to all. Collective; each byte travels once per rank, coalesced up to 250 MB."""
    detached = [tensor.detach() for tensor in tensors]
    if detached and dist.get_world_size(group) > 1:
        dist._broadcast_coalesced(  # type: ignore[attr-defined]
            group, detached, 250 * 2**20, source
        )


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's parameters and buffers, as DDP does when it is created. Collective.

    Names in ``module._ddp_params_and_buffers_to_ignore`` are left out, as by DDP.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [*module.named_parameters(), *module.named_buffers()]
    broadcast_tensors((tensor for name, tensor in named if name not in ignored), group)


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks rank 0's buffers, as DDP does before each synchronised forward. Collective."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    broadcast_tensors((buffer for name, buffer in module.named_buffers() if name not in ignored), group)


def _with_own_storage(value: Any, storages: set[int]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.untyped_storage().data_ptr() in storages else value
    if isinstance(value, dict):
        new = {key: _with_own_storage(item, storages) for key, item in value.items()}
        if all(new[key] is value[key] for key in value):
            return value
        # A shallow copy keeps the type and what hangs on it, such as a state dict's `_metadata`.
        result = copy.copy(value)
        result.update(new)
        return result
    if type(value) in (list, tuple):
        return type(value)(_with_own_storage(item, storages) for item in value)
    return value


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sharding_of(optimizer: Optimizer) -> OptimizerSharding:
    sharding: OptimizerSharding = optimizer._sharding  # type: ignore[attr-defined]
    return sharding
