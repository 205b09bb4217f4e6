"""Buckets planned anew by the order and the time in which gradients become ready, and the plan that is kept.

Before anything is known, parameters are bucketed in the reverse order of registration. The second backward that sends
gradients is measured (the first allocates), and before the next forward all ranks agree on the times, find out what a
reduce-scatter takes, and plan. Where that gives other buckets, parameters, master weights and optimizer state move.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.cost_model import AlphaBeta, assumed_wire
from lightning_parstrat.core.grouping import group_as_named, group_by_readiness
from lightning_parstrat.core.layout import ParameterSpec, parameter_bytes
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.distributed.comm.calibration import reduce_scatter_cost
from lightning_parstrat.distributed.profiling import marked
from lightning_parstrat.distributed.zero1.gatherer import ParameterGatherer
from lightning_parstrat.distributed.zero1.optimizer_sharding import sharding_of
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket
from lightning_parstrat.distributed.zero1.planning import Grouping, PlannedBucket
from lightning_parstrat.distributed.zero1.ready_clock import ReadyClock
from lightning_parstrat.distributed.zero1.redistribution import Move, move_all
from lightning_parstrat.distributed.zero1.reducer import GradientReducer

_MEASURED_ROUND = 2
"""The first one allocates buffers and connects ranks, which takes longer than any later one."""

_ATTEMPTS = 10
"""As long as somebody holds a view of a parameter, its bucket cannot be replaced: the view would show old values."""

_SMALLEST_WORTH_TIMING = 2**23
"""Bytes of parameters; below, buckets are as large as the cap allows: what could be hidden takes no time."""

_LAUNCH_SECONDS = 5e-4
"""What a bucket more costs the processor, beside its latency on the wire: packing, launching, stepping, gathering."""

_LATENCIES = 3
"""A plan looks at backward alone. But a bucket pays a latency on the way home, too, and forward has half the time to
hide it: once in backward, and as two in forward."""

MakesPlan = Callable[[Collection[Tensor], Grouping], "list[PlannedBucket] | None"]
"""Makes buckets of parameters; see :meth:`Replanner.replan`."""


class AsKept(Grouping):
    """As an earlier plan has it; where that does not fit, as without one.

    Attributes:
        fits: Whether parameters were grouped by the plan: then it was measured once, and need not be again.
    """

    def __init__(self, plan: Sequence[Sequence[str]]) -> None:
        self.fits = False
        self._plan = plan
        self._turns = {name: turn for turn, bucket in enumerate(plan) for name in bucket}

    @override
    def groups(self, parameters: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> list[list[int]] | None:
        groups = group_as_named(specs, self._plan) if specs else None
        self.fits = self.fits or groups is not None
        return groups

    @override
    def turn(self, parameter: Tensor, name: str, position: int) -> float:
        return self._turns.get(name, position)


class _ByReadiness(Grouping):
    """The plan whose last bucket arrives earliest."""

    def __init__(self, ready: Mapping[Tensor, float], cap_bytes: int, cost: AlphaBeta | None) -> None:
        self._ready = ready
        self._cap_bytes = cap_bytes
        self._cost = cost

    @override
    def groups(self, parameters: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> list[list[int]]:
        return group_by_readiness(specs, [self._ready[p] for p in parameters], self._cap_bytes, self._cost)

    @override
    def turn(self, parameter: Tensor, name: str, position: int) -> float:
        return self._ready[parameter]


class Replanner:
    """Decides when buckets are planned anew, and carries it out.

    Every method is collective unless it says otherwise.

    Args:
        reducer: Sends gradients, and has the hooks that see them come.
        gatherer: All-gathers parameters.
        policy: How to bucket.
        kept: A plan to begin with, by the parameters' names; empty for none.
        measures: Whether buckets may be planned anew.
        may_move: Whether parameters may get other memory now.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        policy: ShardingPolicy,
        kept: Sequence[Sequence[str]],
        measures: bool,
        may_move: Callable[[], bool],
    ) -> None:
        self._reducer = reducer
        self._gatherer = gatherer
        self._policy = policy
        self.kept = AsKept(kept)
        """The grouping to begin with: the plan that is kept, where it fits."""
        self._measures = measures
        self._may_move = may_move
        self._rounds = 0
        self._attempts = 0
        self._clock: ReadyClock | None = None

    def begin_round(self) -> None:
        """Says that gradients will be sent. Not collective, but all ranks say so equally often."""
        self._rounds += 1
        self._reducer.clock = None
        if self._measures and not self.kept.fits and self._rounds == _MEASURED_ROUND and self._may_change:
            self._clock = self._reducer.clock = ReadyClock(self._device)

    def replan(self, plan: MakesPlan, optimizers: Sequence[Optimizer]) -> None:
        """Plans buckets anew and moves into them, once: when a backward was measured and the plan is another one.

        Takes a few reductions of small messages; for large models some 20 MB more to find out what the wire takes.

        Args:
            plan: Makes buckets of the parameters by a grouping, the same on all ranks; None where it cannot.
            optimizers: Those that step shards; their state moves.
        """
        ready = self._ready_seconds()
        if ready is None:
            return
        buckets = self._sharded_buckets
        with marked("zero1_custom: plan buckets anew"):
            wire = self._measured_wire()
            cost = None if wire is None else _as_planned(wire)
            planned = plan(ready, _ByReadiness(ready, self._cap_bytes(wire), cost))
            # The order within a bucket changes nothing.
            before = [{slot.parameter for slot in bucket.slots} for bucket in buckets]
            if planned is not None and [set(one.members) for one in planned] != before:
                self._adopt(planned, buckets, optimizers)

    @property
    def _may_change(self) -> bool:
        """Whether another plan can come of measuring; the same on all ranks.

        A small bucket that is the only one stays as it is, but for parameters that nobody uses: they get their own.
        """
        buckets = self._sharded_buckets
        large = parameter_bytes([bucket.layout for bucket in buckets]) >= _SMALLEST_WORTH_TIMING
        return large or len(buckets) > 1 or any(not slot.reduced for bucket in buckets for slot in bucket.slots)

    @property
    def _sharded_buckets(self) -> list[ParameterBucket]:
        return [bucket for bucket in self._reducer.buckets if isinstance(bucket, ParameterBucket)]

    def _ready_seconds(self) -> dict[Tensor, float] | None:
        """When the gradient of each sharded parameter is ready; None unless buckets can change by it now."""
        if self._clock is None or not self._measures:
            return None
        self._reducer.clock = None
        # Nothing may be in flight between buckets that change, and no marked parameter may move.
        self._reducer.complete()
        if any(bucket.is_partial for bucket in self._reducer.buckets):
            # In the middle of an accumulation window, as on all ranks: what has been added up stays where it is.
            return None
        self._gatherer.finish()
        buckets = self._sharded_buckets
        parameters = [slot.parameter for bucket in buckets for slot in bucket.slots]
        # A view that somebody holds now would show old values for ever: then another forward may do.
        hindered = not self._may_move() or not all(bucket.is_read_through_parameters for bucket in buckets)
        ready = self._clock.agree(parameters, hindered, self._reducer.control)
        self._attempts += 1
        if ready is not None or self._attempts == _ATTEMPTS:
            self._measures, self._clock = False, None
        return ready

    def _adopt(
        self, planned: Sequence[PlannedBucket], old: Sequence[ParameterBucket], optimizers: Sequence[Optimizer]
    ) -> None:
        """Makes the planned buckets, and moves everything that is in the old ones."""
        control, place = self._reducer.control, self._reducer.collectives.place
        new = [_make(one, index, place, old) for index, one in enumerate(planned)]
        places = {slot.parameter: slot for bucket in new for slot in bucket.slots}
        moves = {slot.parameter: Move(slot, places[slot.parameter]) for bucket in old for slot in bucket.slots}
        of_optimizers = {optimizer: list(sharding_of(optimizer).slots) for optimizer in optimizers}
        states = move_all(moves, of_optimizers, self._gatherer.collectives, control)
        for optimizer in optimizers:
            sharding = sharding_of(optimizer)
            others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
            replicated = {key: value for key, value in optimizer.state.items() if key in sharding.replicated}
            sharding.exchange_slots({parameter: places[parameter] for parameter in sharding.slots})
            # The same dictionary: users may hold it.
            optimizer.state.clear()
            optimizer.state.update({**others, **replicated, **states[optimizer]})
        self._reducer.replace_buckets(old, new)
        for bucket in new:
            bucket.attach_gradients()
        for bucket in old:
            bucket.let_go()
        torch.cuda.empty_cache()

    @property
    def _device(self) -> torch.device:
        return self._reducer.buckets[0].device

    @property
    def _model_bytes(self) -> int:
        return parameter_bytes([bucket.layout for bucket in self._reducer.buckets])

    def _cap_bytes(self, wire: AlphaBeta | None) -> int:
        collectives, (first, *_) = self._reducer.collectives, self._reducer.buckets
        if wire is None:
            wire = assumed_wire(collectives.shard_count, first.device.type, collectives.place.copies)
        return self._policy.bucket_cap_bytes(self._model_bytes, wire, first.device.type)

    def _measured_wire(self) -> AlphaBeta | None:
        """What a reduce-scatter takes; None for a small model, which is not worth measuring it."""
        if self._model_bytes < _SMALLEST_WORTH_TIMING:
            return None
        device = self._device
        return reduce_scatter_cost(self._reducer.collectives, self._reducer.control, device, self._model_bytes)


def _as_planned(wire: AlphaBeta) -> AlphaBeta:
    """What a bucket costs in a plan."""
    latency = _LATENCIES * wire.latency_seconds + _LAUNCH_SECONDS
    return AlphaBeta(latency_seconds=latency, seconds_per_byte=wire.seconds_per_byte)


def _make(planned: PlannedBucket, index: int, place: ShardPlace, old: Sequence[ParameterBucket]) -> ParameterBucket:
    """Moves parameters in; an old bucket that has none left gives its memory back."""
    made = planned.make(index, place)
    for bucket in old:
        bucket.release_if_left()
    return made
