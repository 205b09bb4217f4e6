"""Groups of ranks that train alone, and meet: an outer optimizer steps global parameters by what each group has moved.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), algorithm 1. Buckets take
turns, as the fragments of "Streaming DiLoCo" (2025) do, and are sent while the next step computes. A meeting takes the
mean over groups of how far each has moved a bucket, and gives it to ``torch.optim.SGD`` as a gradient. Each rank then
has the stepped global parameters, and on top what its group has stepped meanwhile.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_parstrat.core.policy import OuterPolicy
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.means import mean_over_ranks
from lightning_parstrat.distributed.comm.work import Exchange, ExchangeThreads
from lightning_parstrat.distributed.engine.buckets import ParameterBucket
from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer

_MOMENTUM = "momentum_buffer"


class OuterSteps:
    """The global parameters, of which each rank has its shards: 4 / G bytes per parameter, and 8 / G with momentum.

    Call it between steps, on all ranks alike.

    Args:
        policy: The learning rate and momentum, and how to send.
        sums: Collectives of the ranks that have the same shards as this one, one of each group.
        gathers: Those of another process group.
        gatherer: Gathers parameters within a group.
    """

    def __init__(
        self, policy: OuterPolicy, sums: Collectives, gathers: Collectives, gatherer: ParameterGatherer
    ) -> None:
        self._policy, self.sums, self.gathers, self._gatherer = policy, sums, gathers, gatherer
        self._threads = ExchangeThreads("meeting of groups")
        self._meeting: dict[ParameterBucket, tuple[Tensor, Exchange]] = {}
        """What was sent, and the mean over groups in flight."""
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
    def launch(self, buckets: Sequence[ParameterBucket]) -> None:
        """Begins a meeting: sends how far this group has moved ``buckets``. Collective; it returns at once.

        A rank sends 2 (K - 1) / K of its shards to the ranks that hold them in K - 1 other groups.

        Args:
            buckets: Some of the buckets, the same on all ranks. None of them is in a meeting.
        """
        self._gatherer.finish()
        for bucket in buckets:
            bucket.take_over_changes()
            sent = _stepped(bucket).clone()
            moved = self._global[bucket] - sent
            self.moved += torch.linalg.vector_norm(moved, dtype=torch.float64).square().cpu()
            steps = mean_over_ranks(moved, self.sums, self.gathers, self._policy.outer_dtype)
            # On a GPU the thread that waits takes the steps: streams belong to threads.
            threads = self._threads if bucket.device.type == "cpu" else None
            self._meeting[bucket] = sent, Exchange(steps, threads)
            self._meeting[bucket][1].hand_over()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends the meeting that was begun: steps the global parameters, and gives them to all ranks. Collective."""
        if not self._meeting or self._optimizer is None:
            return
        self._gatherer.finish()
        meeting, self._meeting = self._meeting, {}
        for bucket, (_, exchange) in meeting.items():
            self.sums.wait(exchange)
            mean = exchange.wait()
            # If a group has diverged, others stay as they are: `moved` shows which group it is.
            self._global[bucket].grad = mean if mean.isfinite().all() else None
        has_met = [bucket for bucket in meeting if self._global[bucket].grad is not None]
        self._optimizer.step()
        self._optimizer.zero_grad()
        for bucket in has_met:
            bucket.take_over_changes()
            stepped, (sent, _) = _stepped(bucket), meeting[bucket]
            # Without steps meanwhile, the global parameters themselves: a sum would round.
            stepped.copy_(torch.where(stepped == sent, self._global[bucket], self._global[bucket] + (stepped - sent)))
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
