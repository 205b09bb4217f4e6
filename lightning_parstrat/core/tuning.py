"""Decides from measurements whether to change DDP's buckets, and to which."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from lightning_parstrat.core.bucketing import exposed_time, lower_bound, optimal_buckets
from lightning_parstrat.core.cost_model import AlphaBeta

Caps = tuple[int, ...]
"""Bytes at which each bucket is full, in the order in which they are sent; the last one holds for all that follow."""


CapsInMiB = float | list[float] | Literal["auto"]
Verdict = Literal["tuned", "default is best", "bandwidth-bound", "not tuned"]

_LAUNCH_SECONDS = 2e-4
"""What each additional bucket costs the processor that computes, however well the wire hides it."""

_PESSIMISM = (1.0, 1.25)
"""How much slower the wire may turn out to be: a plan is judged by the mean over these."""

# 128 KiB to 128 MiB, around DDP's default of 25 MiB: one size for all is what users would try themselves.
_SCALAR_CAPS = tuple(2**exponent for exponent in range(17, 28))
_STEADY_ORDER = 0.9
"""Smallest rank correlation: below it, a plan for the usual order would make buckets wait in most steps."""

_LARGEST_SPREAD = 0.5
_LARGEST_SLOWDOWN = 8.0
"""Where the search for the load ends: beyond it something other than the wire (a slow rank, say) is to blame."""

_BANDWIDTH_BOUND = 0.1
"""Share of a step that even the best plan exposes."""


@dataclass(frozen=True, kw_only=True)
class TuningPolicy:
    """How DDP's buckets are chosen.

    Args:
        bucket_cap_mb: ``"auto"`` plans them from measurement; a number of MiB (2**20 bytes) is the size of all of them;
            a list has one number for each, in the order in which they are sent.
        tune_steps: How many steps are measured before a plan is made, and twice as many while it is tried.
        tune_tolerance: The smallest gain for which buckets are changed, as a share of the time from the start of
            forward to the end of backward.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    bucket_cap_mb: CapsInMiB = "auto"
    tune_steps: int = 10
    tune_tolerance: float = 0.01

    def __post_init__(self) -> None:
        given = self.bucket_cap_mb
        caps = given if isinstance(given, (list, tuple)) else [given]
        if given != "auto" and not (caps and all(_is_size(cap) for cap in caps)):
            raise ValueError(
                f"Invalid bucket_cap_mb: {given!r}. Must be 'auto', a positive number of MiB such as 25, or a list of"
                " such numbers."
            )
        steps = self.tune_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 2:
            raise ValueError(f"Invalid tune_steps: {self.tune_steps!r}. Must be a whole number >= 2.")
        if not _is_number(self.tune_tolerance) or not 0 <= self.tune_tolerance < 1:
            raise ValueError(f"Invalid tune_tolerance: {self.tune_tolerance!r}. Must be a number >= 0 and < 1.")


class Timing(NamedTuple):
    """One step's forward and backward, on one rank or as all ranks see it.

    Attributes:
        seconds: From the start of forward to the end of backward, communication included.
        backward_seconds: From the start of backward to the last gradient.
        exposed_seconds: From the last gradient to the end of backward.
        ready_seconds: Per parameter, from the start of backward; 0 where there was no gradient.
    """

    seconds: float
    backward_seconds: float
    exposed_seconds: float
    ready_seconds: tuple[float, ...]


class Problem(NamedTuple):
    """The input of a plan.

    Attributes:
        nbytes: Bytes of each parameter's gradient.
        ready_seconds: When each is ready.
        order: Positions of the parameters that share buckets, in the order in which those are filled. Others, of
            another dtype, are put into buckets of their own by the same caps.
        assign: The parameters of each bucket that caps come to, in the order in which they are sent; None stands for
            the default.
    """

    nbytes: Sequence[int]
    ready_seconds: Sequence[float]
    order: Sequence[int]
    assign: Callable[[Caps | None], list[list[int]]]


class Plan(NamedTuple):
    """Buckets, and what a step exposes with them according to the model."""

    caps: Caps | None
    buckets: tuple[tuple[int, ...], ...]
    exposed_seconds: float


class Decision(NamedTuple):
    """What is to be tried, if anything; the default, and what no plan can expose less than."""

    default: Plan
    planned: Plan
    bound_seconds: float
    verdict: Verdict
    reason: str


def order_stability(ready_seconds: Sequence[Sequence[float]]) -> float:
    """How similar the order in which gradients become ready is from step to step.

    Args:
        ready_seconds: Per step, the times of all parameters.

    Returns:
        The smallest rank correlation (Spearman's) of a step's times with their medians: 1 where the order never
        changes, about 0 where it is random in every step.
    """
    medians = [statistics.median(times) for times in zip(*ready_seconds, strict=True)]
    expected = _ranks(medians)
    return min((_correlation(_ranks(step), expected) for step in ready_seconds), default=1.0)


def typical(timings: Sequence[Timing]) -> Timing:
    """The medians over steps."""
    return Timing(
        statistics.median(timing.seconds for timing in timings),
        statistics.median(timing.backward_seconds for timing in timings),
        statistics.median(timing.exposed_seconds for timing in timings),
        tuple(statistics.median(times) for times in zip(*(one.ready_seconds for one in timings), strict=True)),
    )


def noise(seconds: Sequence[float]) -> float:
    """How far the median of measurements may be off: its standard error, from the median distance to it."""
    middle = statistics.median(seconds)
    # 1.4826 makes the median distance a standard deviation (of a normal distribution), 1.2533 that of a median.
    return 1.86 * statistics.median(abs(one - middle) for one in seconds) / math.sqrt(len(seconds))


def under_load(problem: Problem, idle: AlphaBeta, exposed_seconds: float) -> AlphaBeta:
    """The cost of collectives while the module computes, from what the default's buckets were measured to expose.

    A wire that is measured while nothing computes is faster than one that shares processors and memory with a
    backward. The factor between the two is the one with which the model predicts the measured exposure.

    Args:
        problem: What was trained.
        idle: The cost while nothing computes.
        exposed_seconds: What the default was measured to expose.
    """

    def exposed(factor: float) -> float:
        return predicted(problem, problem.assign(None), _times(idle, factor))

    # Bisection by factors: what is exposed never shrinks as the wire gets slower.
    low, high = 1.0 / _LARGEST_SLOWDOWN, _LARGEST_SLOWDOWN
    if exposed(high) <= exposed_seconds:
        return _times(idle, high)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if exposed(middle) < exposed_seconds else (low, middle)
    return _times(idle, high)


def predicted(problem: Problem, buckets: Iterable[Sequence[int]], cost: AlphaBeta) -> float:
    """Seconds that buckets expose, sent in this order."""
    sent = [list(bucket) for bucket in buckets]
    order = [index for bucket in sent for index in bucket]
    return exposed_time(
        [problem.nbytes[index] for index in order],
        [problem.ready_seconds[index] for index in order],
        list(accumulate(len(bucket) for bucket in sent)),
        cost.seconds,
    )


def decide(problem: Problem, cost: AlphaBeta, step_seconds: float, smallest_gain: float) -> Decision:
    """Plans, and says whether the plan is worth a trial.

    Args:
        problem: What is trained.
        cost: What a bucket takes.
        step_seconds: A step with the default's buckets.
        smallest_gain: Seconds; a smaller gain does not count.
    """
    default = _plan(problem, None, cost)
    planned = min(_plans(problem, cost), key=lambda plan: _objective(problem, plan, cost))
    order = sorted(range(len(problem.nbytes)), key=lambda index: problem.ready_seconds[index])
    bound = lower_bound(
        [problem.nbytes[index] for index in order], [problem.ready_seconds[index] for index in order], cost
    )
    gain = default.exposed_seconds - planned.exposed_seconds
    # Other caps may come to the default's own buckets: then there is nothing to try.
    if gain > smallest_gain and planned.buckets != default.buckets:
        return Decision(default, planned, bound, "tuned", f"a gain of {_ms(gain)} per step is predicted")
    limit = f"the best plan gains {_ms(max(gain, 0.0))} per step, which is less than {_ms(smallest_gain)}"
    # One large tensor that is ready last exposes much, too, but then bandwidth is not what is missing.
    saturated = cost.seconds(sum(problem.nbytes)) > max(problem.ready_seconds)
    if saturated and bound > _BANDWIDTH_BOUND * step_seconds:
        return Decision(
            default,
            default,
            bound,
            "bandwidth-bound",
            f"gradients take longer on the wire than backward has, and no buckets can expose less than {_ms(bound)};"
            " zero1_custom hides half of them behind forward, comm_hook='bf16' sends half of them",
        )
    return Decision(default, default, bound, "default is best", limit)


def reason_not_to_plan(stability: float, spread: float) -> str | None:
    """Why measurements are too noisy for a plan; None where they are not."""
    if stability < _STEADY_ORDER:
        return (
            f"the order in which gradients become ready changes from step to step (rank correlation {stability:.2f}"
            f" with the usual one, needed is {_STEADY_ORDER})"
        )
    if spread > _LARGEST_SPREAD:
        return f"the times of collectives are noise (half of them are more than {spread:.0%} off any straight line)"
    return None


def _plans(problem: Problem, cost: AlphaBeta) -> list[Plan]:
    """Exact plans for the wire as it is and for a slower one, and buckets of one size."""
    nbytes = [problem.nbytes[index] for index in problem.order]
    ready = [problem.ready_seconds[index] for index in problem.order]
    candidates: list[Caps] = [(size,) for size in _SCALAR_CAPS]
    for factor in _PESSIMISM:
        slower = _times(cost, factor)
        # Launching is no time on the wire; counted as latency, it makes the exact planner merge buckets that gain less.
        hindered = AlphaBeta(
            latency_seconds=slower.latency_seconds + _LAUNCH_SECONDS, seconds_per_byte=slower.seconds_per_byte
        )
        for fewest in (True, False):
            stops = optimal_buckets(nbytes, ready, hindered, fewest=fewest)
            candidates.append(tuple(sum(nbytes[a:b]) for a, b in zip((0, *stops), stops, strict=False)))
    # A bucket of empty gradients has 0 bytes, which is no cap that DDP takes.
    return [_plan(problem, caps, cost) for caps in dict.fromkeys(candidates) if min(caps) > 0]


def _plan(problem: Problem, caps: Caps | None, cost: AlphaBeta) -> Plan:
    buckets = problem.assign(caps)
    return Plan(caps, tuple(map(tuple, buckets)), predicted(problem, buckets, cost))


def _objective(problem: Problem, plan: Plan, cost: AlphaBeta) -> float:
    # Over a slower wire as well: a plan that is best for exactly the measured one may lose most when that was
    # optimistic.
    exposed = [predicted(problem, plan.buckets, _times(cost, factor)) for factor in _PESSIMISM]
    return statistics.fmean(exposed) + _LAUNCH_SECONDS * len(plan.buckets)


def _times(cost: AlphaBeta, factor: float) -> AlphaBeta:
    return AlphaBeta(latency_seconds=factor * cost.latency_seconds, seconds_per_byte=factor * cost.seconds_per_byte)


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order, from 0; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for index in order[start:stop]:
            ranks[index] = (start + stop - 1) / 2
        start = stop
    return ranks


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    # `statistics.correlation` refuses constants; a single gradient, or all ready at once, have an order that is steady.
    if len(set(one)) < 2 or len(set(other)) < 2:
        return 1.0
    return statistics.correlation(one, other)


def _is_number(value: object) -> bool:
    # bool is a subclass of int: True would pass as 1.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and _is_number(value) and value > 0


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
