"""Which parameters share a bucket, once it is known when their gradients are ready.

The first bucket should be small, to start sending early, and so should the last, which nothing hides. Neither is a rule
here: both follow from choosing the plan whose last bucket arrives earliest.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise

from lightning_parstrat.core.bucketing import optimal_buckets
from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.core.layout import ParameterSpec, group_by_cap, take_small_along

_SMALLEST_CAP, _SMALLEST_CAP_OF_GPUS, _LARGEST_CAP = 2**23, 2**26, 2**29
"""Smaller buckets save next to nothing at the ends of a step, and each costs the host time: some dozen launches, in
which a GPU reads and writes ten times as many bytes as CPUs send. What is larger has the forward wait for too much at
its beginning."""


def default_bucket_cap(model_bytes: int, wire: AlphaBeta, device_type: str = "cpu") -> int:
    """How large buckets should be, by the model and by what the wire takes, which grows with the number of ranks.

    Buckets of S bytes, of P in all, each pay the latency: P / S * alpha. Nothing hides the last of backward, nor the
    first of forward: S * beta. The sum of the two is least at ``sqrt(P * alpha / beta)``. The page of measurements has
    what that comes to from 2 to 1,024 ranks.

    Args:
        model_bytes: What is reduced in a step.
        wire: What a large reduce-scatter takes over these ranks.
        device_type: Of the gradients: "cuda" or "cpu".

    Returns:
        Bytes: the power of two up to that root, from 8 MiB, on GPUs 64, to 512 MiB. Above the smallest it is no more
        than half of the model, so that two buckets take no more memory than gradients do under DDP. A power of two, so
        that measured again, a wire that is a little different mostly gives the same plan.
    """
    latency, per_byte = wire.latency_seconds, wire.seconds_per_byte
    best = math.sqrt(model_bytes * latency / per_byte) if per_byte else math.inf
    smallest = _SMALLEST_CAP if device_type == "cpu" else _SMALLEST_CAP_OF_GPUS
    bounded = max(int(min(best, model_bytes / 2, _LARGEST_CAP)), smallest)
    return 1 << (bounded.bit_length() - 1)


def group_by_readiness(
    parameters: Sequence[ParameterSpec], ready_seconds: Sequence[float], cap_bytes: int, cost: AlphaBeta | None
) -> list[list[int]]:
    """Groups parameters in the order in which their gradients become ready.

    Args:
        parameters: In any order.
        ready_seconds: When the gradient of each is ready, from any origin; infinity where there was none. Those come
            last and in buckets of their own, so that they hold up no other.
        cap_bytes: No bucket of several parameters is larger.
        cost: What a bucket takes on the wire, for the plan whose last bucket arrives earliest; None fills each bucket
            up to the cap.

    Returns:
        Positions in ``parameters`` per bucket, ordered by when the last gradient of each is ready.
    """
    by_group: dict[Hashable, list[int]] = {}
    for index in sorted(range(len(parameters)), key=lambda index: (ready_seconds[index], index)):
        by_group.setdefault((parameters[index].group, math.isinf(ready_seconds[index])), []).append(index)
    groups: list[list[int]] = []
    for members in by_group.values():
        # The planner wants finite times; and nothing is gained by planning for gradients that do not come.
        if cost is None or math.isinf(ready_seconds[members[0]]):
            by_cap = group_by_cap([parameters[index] for index in members], cap_bytes)
            groups += [[members[position] for position in bucket] for bucket in by_cap]
            continue
        joined = take_small_along([parameters[index].nbytes for index in members], cap_bytes)
        together = [
            [members[position] for position in positions]
            for of_neighbours in joined
            for positions in _ready_together(of_neighbours, [ready_seconds[i] for i in members], cost.latency_seconds)
        ]
        sizes = [sum(parameters[index].nbytes for index in indices) for indices in together]
        ready = [ready_seconds[indices[-1]] for indices in together]
        # The fewest: each collective also costs the host time, which the model of the wire does not count.
        stops = optimal_buckets(sizes, ready, cost, max_bucket_bytes=cap_bytes)
        for start, stop in zip((0, *stops), stops, strict=False):
            groups.append([index for indices in together[start:stop] for index in indices])
    # Reductions launch in this order, and a bucket can go when its last gradient is ready. Positions break ties, so
    # that all ranks sort alike.
    return sorted(groups, key=lambda bucket: (ready_seconds[bucket[-1]], bucket[-1]))


def _ready_together(positions: list[int], ready_seconds: Sequence[float], patience: float) -> list[list[int]]:
    """Cuts neighbours where the next is ready so much later that it is not worth waiting for."""
    cut = [positions[:1]]
    for before, position in pairwise(positions):
        if ready_seconds[position] - ready_seconds[before] > patience:
            cut.append([])
        cut[-1].append(position)
    return cut


def group_as_named(parameters: Sequence[ParameterSpec], plan: Sequence[Sequence[str]]) -> list[list[int]] | None:
    """The grouping of an earlier plan.

    Args:
        parameters: In any order.
        plan: Names of parameters per bucket, in the order of the buckets.

    Returns:
        Positions in ``parameters`` per bucket; None where the plan is of other parameters, or puts together what may
        not share a bucket.
    """
    positions = {spec.name: index for index, spec in enumerate(parameters)}
    # A name that occurs twice does not identify a parameter.
    if len(positions) != len(parameters):
        return None
    # Names without a parameter are passed over: it may have been frozen since.
    groups = [[positions[name] for name in bucket if name in positions] for bucket in plan]
    groups = [bucket for bucket in groups if bucket]
    if sorted(index for bucket in groups for index in bucket) != list(range(len(parameters))):
        return None
    if any(len({parameters[index].group for index in bucket}) > 1 for bucket in groups):
        return None
    return groups
