"""Groups of ranks that train alone, and meet: an outer optimizer steps global parameters by what each group has moved.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), algorithm 1. Buckets take
turns, as the fragments of "Streaming DiLoCo" (2025) do, and are sent while the next step computes. A meeting takes the
mean over groups of how far each has moved a bucket, as a gradient for SGD with Nesterov's momentum. Each rank then has
the stepped global parameters, and on top what its group has stepped meanwhile.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.policy import OuterPolicy
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.means import mean_over_ranks
from lightning_parstrat.distributed.comm.work import Exchange, ExchangeThreads, set_aside
from lightning_parstrat.distributed.engine.buckets import ParameterBucket
from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer

_LEFT_OPEN: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
"""After which step a training has left a meeting open, by the process group of its messages."""


class OuterSteps:
    """The global parameters, of which each rank has its shards: 4 / G bytes per parameter, and 8 / G with momentum.

    Call it between steps, on all ranks alike.

    Args:
        policy: The learning rate and momentum, and how to send.
        sums: Collectives of the ranks that have the same shards as this one, one of each group.
        gathers: Those of another process group.
        gatherer: Gathers parameters within a group.
        names: The names of the parameters.
        momenta: Those that :meth:`momenta` has returned in an earlier training, by names. They may be empty.
    """

    def __init__(
        self,
        policy: OuterPolicy,
        sums: Collectives,
        gathers: Collectives,
        gatherer: ParameterGatherer,
        names: Mapping[Tensor, str],
        momenta: Mapping[str, Tensor],
    ) -> None:
        self._policy, self.sums, self.gathers, self._gatherer = policy, sums, gathers, gatherer
        self._names, self._loaded = dict(names), momenta
        self._threads = ExchangeThreads("meeting of groups")
        self._meeting: dict[ParameterBucket, tuple[Tensor, Exchange]] = {}
        """The difference that was sent, and the mean over groups in flight."""
        self._global: dict[ParameterBucket, Tensor] = {}
        self._momentum: dict[ParameterBucket, Tensor] = {}
        self.moved = torch.zeros((), dtype=torch.float64)
        """The square of how far this rank's shards had moved at their meetings. Set it back to 0 as you like."""

    @property
    def buckets(self) -> list[ParameterBucket]:
        """The buckets, in the order in which they were adopted."""
        return list(self._global)

    @torch.no_grad()
    def adopt(self, buckets: Sequence[ParameterBucket], names: Mapping[Tensor, str]) -> None:
        """Copies the parameters of new buckets, before their first step.

        Args:
            buckets: All buckets.
            names: The names of their parameters.
        """
        self._names.update(names)
        self._gatherer.finish()
        for bucket in buckets:
            if bucket in self._global:
                continue
            bucket.take_over_changes()
            held = self._global[bucket] = bucket.stepped.to(bucket.sum_dtype, copy=True)
            if not self._policy.outer_momentum:
                continue
            momentum = self._momentum[bucket] = torch.zeros_like(held)
            for slot in bucket.slots:
                loaded = self._loaded.get(self._names[slot.parameter])
                if loaded is not None:
                    slot.view_into_shard(momentum).copy_(slot.part_of(loaded))

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
            sent = bucket.stepped.clone()
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
        if not self._meeting:
            return
        self._gatherer.finish()
        for bucket, (sent, exchange) in self._meeting.items():
            self.sums.wait(exchange)
            mean = exchange.wait()
            # If a group has diverged, others stay as they are: `moved` shows which group it is.
            if mean.isfinite().all():
                self._step(bucket, mean, sent)
            # In any case: another rank of the group may have a shard without NaN.
            self._gatherer.launch(bucket)
        self._meeting = {}
        self._gatherer.finish_prompt()

    @torch.no_grad()
    def are_apart(self) -> list[bool]:
        """Whether this rank's shards of each bucket differ from the global parameters. Collective within the group."""
        self._gatherer.finish()
        for bucket in self._global:
            bucket.take_over_changes()
        return [not torch.equal(one.stepped, held.to(one.stepped.dtype)) for one, held in self._global.items()]

    def _step(self, bucket: ParameterBucket, moved: Tensor, sent: Tensor) -> None:
        held, momentum = self._global[bucket], self._momentum.get(bucket)
        if momentum is not None:
            # Nesterov's momentum, as in `torch.optim.SGD`.
            momentum.mul_(self._policy.outer_momentum).add_(moved)
            moved = moved + self._policy.outer_momentum * momentum
        held.sub_(moved, alpha=self._policy.outer_lr)
        bucket.take_over_changes()
        stepped = bucket.stepped
        # Without steps meanwhile, the global parameters themselves: a sum would round.
        stepped.copy_(torch.where(stepped == sent, held, held + (stepped - sent)))

    def abandon(self, step: int) -> None:
        """Drops a meeting that other ranks may not finish, and the global parameters. Not collective.

        Args:
            step: The number of steps so far.
        """
        if self._meeting:
            set_aside([exchange.in_flight for _, exchange in self._meeting.values()])
            _LEFT_OPEN[self.sums.group] = step
        self._meeting, self._global = {}, {}

    @property
    def left_open(self) -> int:
        """After which step an earlier training of these processes has left a meeting open. -1 if none has."""
        return _LEFT_OPEN.get(self.sums.group, -1)

    def momenta(self, keeps: bool) -> dict[str, Tensor]:
        """The momentum of each parameter, whole, in host memory. Collective within the group.

        Args:
            keeps: Whether this rank gets it. Other ranks get nothing.
        """
        found: dict[str, Tensor] = {}
        for bucket, momentum in self._momentum.items():
            buffer = momentum.new_zeros(bucket.layout.numel)
            bucket.shard_of(buffer).copy_(momentum)
            self._gatherer.collectives.all_gather(buffer, bucket.layout.bounds).wait()
            for slot in bucket.slots if keeps else ():
                found[self._names[slot.parameter]] = slot.view_into(buffer).clone().cpu()
        return found
