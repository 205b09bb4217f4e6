"""From parameters and optimizers to buckets: the same plan on every rank."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.layout import (
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
from lightning_parstrat.distributed.engine.shardability import immovable_parameters
from lightning_parstrat.distributed.engine.state import grouped_parameters
from lightning_parstrat.distributed.torch_compat import FakeTensor, names_ignored_by_ddp

Owners = tuple[int, ...]
"""The positions of the optimizers that a parameter belongs to."""

UNNAMED = "<not in the module>"
"""The name of a parameter that an optimizer has, and the module does not."""


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

    def buckets(
        self, owners: Mapping[Tensor, Owners], partitions: Mapping[int, Partition], first: int
    ) -> Iterator[GradientBucket]:
        """Makes buckets of parameters, one by one, in the order of their reductions.

        Args:
            owners: The parameters, each with its optimizers. Parameters without any stay in their memory, and every
                rank gets their mean gradient.
            partitions: How each optimizer's parameters may be cut, by the optimizer's position.
            first: The index of the first bucket.
        """
        ordered = sorted(owners, key=self._turn_of)
        specs = [
            ParameterSpec(
                name=self._name(parameter),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
                itemsize=parameter.element_size(),
                group=(str(parameter.dtype), str(parameter.device), owners[parameter]),
                partition="parameter" if "parameter" in [partitions[one] for one in owners[parameter]] else "element",
            )
            for parameter in ordered
        ]
        # Frozen parameters send nothing, and may have a layout without a size.
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        model_bytes = sum(one.numel() * one.element_size() for one in trained)
        layouts = plan_buckets(
            specs,
            LayoutPolicy(
                world_size=self._shards,
                bucket_cap_bytes=self._policy.bucket_cap_bytes(
                    model_bytes, self._shards, self._device_type, self._place.copies
                ),
                alignment_bytes=64 if self._device_type == "cpu" else 256,
            ),
        )
        # Before anything is moved.
        stepped_by = [owners[parameter] for parameter in ordered]
        check_agreement(self._control, digest((fingerprint(specs, layouts), stepped_by)))
        for index, layout in enumerate(layouts, first):
            make = ParameterBucket if owners[ordered[layout.slots[0].parameter]] else GradientBucket
            yield make(index, layout, ordered, self._place, self._policy)

    def fits(self, buckets: Sequence[ParameterBucket]) -> bool:
        """Whether all gradients of a bucket are made before those of the next."""
        of_buckets = [[self._turn_of(slot.parameter) for slot in bucket.slots] for bucket in buckets]
        return all(max(earlier) < min(later) for earlier, later in pairwise(of_buckets))

    def _turn_of(self, parameter: Tensor) -> int:
        # A parameter that the module does not have comes first.
        return self._turn.get(self._name(parameter), -1)

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, UNNAMED)


def owners_of(
    module: nn.Module, optimizers: Sequence[Optimizer], partitions: Mapping[int, Partition], placed: Collection[Tensor]
) -> dict[Tensor, Owners]:
    """The parameters whose gradients are reduced, each with the positions of the optimizers that step its shards.

    Parameters that every rank steps, or none, have no positions. Parameters that DDP ignores are left out.

    Args:
        module: The module.
        optimizers: Its optimizers.
        partitions: How sharded optimizers' parameters may be cut, by the optimizers' positions.
        placed: Parameters that are in buckets already. They stay sharded.
    """
    whole = immovable_parameters(module, optimizers)
    for number, optimizer in enumerate(optimizers):
        if number not in partitions:
            whole |= set(grouped_parameters(optimizer))
    owners: dict[Tensor, Owners] = {}
    for number in partitions:
        for parameter in grouped_parameters(optimizers[number]):
            if parameter in placed or parameter not in whole:
                owners[parameter] = (*owners.get(parameter, ()), number)
    ignored = names_ignored_by_ddp(module)
    for name, parameter in module.named_parameters():
        has_gradients = parameter.is_floating_point() or parameter.is_complex()
        is_bucketed = has_gradients and parameter.layout == torch.strided
        if is_bucketed and name not in ignored and parameter not in placed:
            owners.setdefault(parameter, ())
    # Another stage of a pipeline has them.
    return {parameter: numbers for parameter, numbers in owners.items() if not isinstance(parameter, FakeTensor)}
