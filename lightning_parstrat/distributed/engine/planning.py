"""From parameters and optimizers to buckets: the same plan on every rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_parstrat.core.layout import (
    BucketLayout,
    LayoutPolicy,
    ParameterSpec,
    Partition,
    fingerprint,
    plan_buckets,
)
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.agreement import check_agreement
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.buckets import GradientBucket, ParameterBucket
from lightning_parstrat.distributed.torch_compat import names_ignored_by_ddp

Owners = tuple[int, ...]
"""The positions of the optimizers that a parameter belongs to."""


class BucketPlanner:
    """Plans buckets. Collective: the ranks compare each plan before anything is moved.

    Args:
        module: Gives the parameters names, and their order.
        policy: How to bucket.
        control: Compares plans. Its group works on host memory.
        gradients: Will carry gradients to their shards.
        order: Names of parameters in the order of their gradients. All others follow, in the reverse of registration.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: ShardingPolicy,
        control: Collectives,
        gradients: Collectives,
        order: Sequence[str],
    ) -> None:
        self._policy = policy
        self._control = control
        self._shards, self._place = gradients.shard_count, gradients.place
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        in_turn = dict.fromkeys([*order, *reversed(self._names.values())])
        self._turn = {name: turn for turn, name in enumerate(in_turn)}
        self._device_type = next((parameter.device.type for parameter in self._names), "cpu")

    def sharded_buckets(
        self,
        owners: Mapping[Tensor, Owners],
        partitions: Mapping[int, Partition],
        first: int,
    ) -> Iterator[ParameterBucket]:
        """Makes buckets of parameters of which each rank steps a shard, one by one, in the order of their reductions.

        Args:
            owners: The parameters, each with its optimizers.
            partitions: How each optimizer's parameters may be cut, by the optimizer's position.
            first: The index of the first bucket.
        """
        ordered = self._in_order_of_gradients(owners)
        ready = {parameter: number for number, parameter in enumerate(ordered)}
        uncut = {parameter for parameter in ordered if "parameter" in [partitions[one] for one in owners[parameter]]}
        specs: list[ParameterSpec] = []
        planned: list[tuple[int, BucketLayout, list[Tensor]]] = []
        for partition in get_args(Partition):
            parameters = [parameter for parameter in ordered if (parameter in uncut) == (partition == "parameter")]
            own = [self._spec(parameter, owners[parameter]) for parameter in parameters]
            specs += own
            for layout in self._plan(own, partition):
                # The bucket is sent with its last gradient.
                last = max(ready[parameters[slot.parameter]] for slot in layout.slots)
                planned.append((last, layout, parameters))
        self._check(specs, [layout for _, layout, _ in planned])
        # Stable: buckets that are ready together keep the order of the layout on every rank.
        for index, (_, layout, parameters) in enumerate(sorted(planned, key=lambda one: one[0]), first):
            dtype, policy = parameters[layout.slots[0].parameter].dtype, self._policy
            kinds = policy.reduced_in(dtype), policy.gathered_in(dtype), policy.master_dtype(dtype)
            yield ParameterBucket(index, layout, parameters, self._place, *kinds)

    def names(self, buckets: Sequence[GradientBucket]) -> list[list[str]]:
        """The names of the parameters of each bucket, for a plan that is kept."""
        return [[self._name(slot.parameter) for slot in bucket.slots] for bucket in buckets]

    def gradient_buckets(self, parameters: Sequence[Tensor], first: int) -> list[GradientBucket]:
        """Buckets of parameters that stay in their memory. Every rank gets their mean gradient."""
        ordered = self._in_order_of_gradients(parameters)
        specs = [self._spec(parameter, ()) for parameter in ordered]
        layouts = self._plan(specs, "element")
        self._check(specs, layouts)
        made = []
        for index, layout in enumerate(layouts, first):
            comm_dtype = self._policy.reduced_in(ordered[layout.slots[0].parameter].dtype)
            made.append(GradientBucket(index, layout, ordered, self._place, comm_dtype))
        return made

    def _in_order_of_gradients(self, parameters: Sequence[Tensor] | Mapping[Tensor, Owners]) -> list[Tensor]:
        # A parameter that the module does not have comes first.
        return sorted(parameters, key=lambda parameter: self._turn.get(self._name(parameter), -1))

    def _plan(self, specs: Sequence[ParameterSpec], partition: Partition) -> tuple[BucketLayout, ...]:
        policy = LayoutPolicy(
            world_size=self._shards,
            bucket_cap_bytes=self._cap_bytes(),
            partition=partition,
            alignment_bytes=64 if self._device_type == "cpu" else 256,
        )
        return plan_buckets(specs, policy)

    def _cap_bytes(self) -> int:
        # Frozen parameters send nothing, and may have a layout without a size.
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        model_bytes = sum(one.numel() * one.element_size() for one in trained)
        return self._policy.bucket_cap_bytes(model_bytes, self._shards, self._device_type, self._place.copies)

    def _check(self, specs: Sequence[ParameterSpec], layouts: Sequence[BucketLayout]) -> None:
        """Compares a plan over all ranks, before anything is moved. Collective."""
        check_agreement(self._control, fingerprint(specs, layouts))

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, "<not in the module>")

    def _spec(self, parameter: Tensor, owners: Owners) -> ParameterSpec:
        return ParameterSpec(
            name=self._name(parameter),
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype),
            itemsize=parameter.element_size(),
            group=(str(parameter.dtype), str(parameter.device), owners),
        )


def trained_outside(module: nn.Module, sharded: Mapping[Tensor, Owners]) -> list[Tensor]:
    """Parameters that can have gradients and are in no sharded optimizer, without those that DDP ignores."""
    ignored = names_ignored_by_ddp(module)
    return [
        parameter
        for name, parameter in module.named_parameters()
        if name not in ignored
        and parameter not in sharded
        and (parameter.is_floating_point() or parameter.is_complex())
        and parameter.layout == torch.strided
    ]
