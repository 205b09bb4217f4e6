"""Groups of ranks that train alone, and meet: an outer optimizer steps global parameters by what each group has moved.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), algorithm 1. Buckets take
turns, as the fragments of "Streaming DiLoCo" (2025) do. A meeting takes the mean over groups of how far each has moved
a bucket, and gives it to ``torch.optim.SGD`` as a gradient. All ranks then have the stepped global parameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_parstrat.core.policy import OuterPolicy
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.means import mean_over_ranks
from lightning_parstrat.distributed.engine.buckets import ParameterBucket
from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer

_MOMENTUM = "momentum_buffer"


class OuterSteps:
    """The global parameters and their momentum, of which each rank has its shards: 8 / G bytes per parameter.

    Call it between steps, on all ranks alike.

    Args:
        policy: The learning rate and momentum, and how to send.
        holders: The ranks that have the same shards as this one, one of each group.
        gatherer: Gathers parameters within a group.
    """

    def __init__(self, policy: OuterPolicy, holders: Collectives, gatherer: ParameterGatherer) -> None:
        self._policy, self.holders, self._gatherer = policy, holders, gatherer
        self._global: dict[ParameterBucket, Tensor] = {}
        self._momenta: Mapping[str, Tensor] = {}
        self._names: Mapping[Tensor, str] = {}
        self._optimizer: torch.optim.SGD | None = None
        self.moved = torch.zeros((), dtype=torch.float64)
        """The square of how far this rank's shards had moved at their meetings. Set it back to 0 as you like."""

    @property
    def buckets(self) -> list[ParameterBucket]:
        """The buckets, in the order in which they were adopted."""
        return list(self._global)

    def adopt(self, buckets: Sequence[ParameterBucket], names: Mapping[Tensor, str]) -> None:
        """Copies the parameters of new buckets, before their first step.

        Args:
            buckets: All buckets.
            names: The names of the parameters.
        """
        new = [bucket for bucket in buckets if bucket not in self._global]
        if not new:
            return
        self._names = names
        self._gatherer.finish()
        for bucket in new:
            bucket.take_over_changes()
            self._global[bucket] = _stepped(bucket).to(bucket.sum_dtype, copy=True)
            group = {"params": [self._global[bucket]]}
            if self._optimizer is None:
                lr, momentum = self._policy.outer_lr, self._policy.outer_momentum
                self._optimizer = torch.optim.SGD([group], lr=lr, momentum=momentum, nesterov=momentum > 0)
            else:
                self._optimizer.add_param_group(group)
            self._restore_momentum(bucket)

    @torch.no_grad()
    def meet(self, buckets: Sequence[ParameterBucket]) -> None:
        """Steps the global parameters of ``buckets``, and gives them to all ranks. Collective; the host waits.

        It sends 2 (K - 1) / K of a rank's shards to K - 1 other groups, and gathers parameters within the group.

        Args:
            buckets: Some of the buckets, the same on all ranks.
        """
        if not buckets or self._optimizer is None:
            return
        self._gatherer.finish()
        for bucket in buckets:
            bucket.take_over_changes()
            held = self._global[bucket]
            moved = held - _stepped(bucket)
            self.moved += torch.linalg.vector_norm(moved, dtype=torch.float64).square().cpu()
            mean = mean_over_ranks(moved, self.holders, self._policy.outer_dtype)
            # If a group has diverged, others stay as they are: `moved` shows which group it is.
            held.grad = mean if mean.isfinite().all() else None
        stepped = [bucket for bucket in buckets if self._global[bucket].grad is not None]
        self._optimizer.step()
        self._optimizer.zero_grad()
        for bucket in stepped:
            _stepped(bucket).copy_(self._global[bucket])
        for bucket in buckets:
            self._gatherer.launch(bucket)
        self._gatherer.finish_prompt()

    def momenta(self, keeps: bool) -> dict[str, Tensor]:
        """The momentum of each parameter, whole, in host memory. Collective within the group.

        Args:
            keeps: Whether this rank gets it. Other ranks get nothing.
        """
        found: dict[str, Tensor] = {}
        for bucket, held in self._global.items():
            momentum = None if self._optimizer is None else self._optimizer.state[held].get(_MOMENTUM)
            # The same on all ranks: a bucket has met on all of them, or on none.
            if momentum is None:
                continue
            buffer = momentum.new_zeros(bucket.layout.numel)
            bucket.shard_of(buffer).copy_(momentum)
            self._gatherer.collectives.all_gather(buffer, bucket.layout.bounds).wait()
            for slot in bucket.slots if keeps else ():
                found[self._names[slot.parameter]] = slot.view_into(buffer).clone().cpu()
        return found

    def load(self, momenta: Mapping[str, Tensor]) -> None:
        """Takes momenta that :meth:`momenta` has returned. Call it before :meth:`adopt`.

        Args:
            momenta: By the names of the parameters.
        """
        self._momenta = momenta

    def _restore_momentum(self, bucket: ParameterBucket) -> None:
        found = {
            slot: self._momenta[name] for slot in bucket.slots if (name := self._names[slot.parameter]) in self._momenta
        }
        if found and self._optimizer is not None:
            held = self._global[bucket]
            momentum = self._optimizer.state[held][_MOMENTUM] = torch.zeros_like(held)
            for slot, whole in found.items():
                slot.view_into_shard(momentum).copy_(slot.part_of(whole))


def _stepped(bucket: ParameterBucket) -> Tensor:
    """What this rank's optimizer steps of a bucket: 1-D."""
    return bucket.shard if bucket.master is None else bucket.master
