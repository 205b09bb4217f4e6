"""Which gradients travel together so that the last of them arrives soonest: exact plans for a channel that is serial.

Items come in the order in which they become ready. A plan cuts them into buckets of neighbours; a bucket may start when
its last item is ready and the bucket before it has arrived, and takes T(its bytes). Waiting for more items saves
latencies, sending at once fills the channel: S. Shi, X. Chu and B. Li, "MG-WFBP: Merging Gradients Wisely for
Efficient Communication in Distributed Deep Learning" (arXiv 1912.09268), state the problem and solve it greedily, which
is not always optimal. Here it is a shortest path. With P_j the bytes and r_j the ready time of the first j items, the
earliest that they can have arrived is

    f(0) = -infinity,    f(j) = min over i < j of max(f(i), r_j) + T(P_j - P_i).

For T(m) = alpha + beta m two starts i are enough for each j:

* f never falls: whoever sends the first j + 1 items can leave the last one out, and is done no later.
* Nor does f(i) - beta P_i: for i < k, cut the best plan for k off after item i. If a bucket ends there, all bytes from
  i to k travelled after it. If not, the bucket that is cut need not wait longer than before, and it took at least
  beta (P_k - P_i) less to send than it and those after it did. Either way f(i) <= f(k) - beta (P_k - P_i).
* By the first, the starts that are drained, f(i) <= r_j, come before all others. With one of them the bucket arrives at
  r_j + alpha + beta (P_j - P_i): the last is best. With one of the others it arrives at
  alpha + beta P_j + (f(i) - beta P_i): by the second, the first is best.
* As r_j does not fall either, the place where the two meet only moves forward: O(n) for all j.

A cap on the bytes of a bucket changes nothing of this: what is left of an allowed bucket is allowed, and so the starts
that are allowed for j are those from some place on, which only moves forward.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_parstrat.core.cost_model import AlphaBeta

Cost = Callable[[int], float]
"""Seconds that a bucket of so many bytes takes, at least 0."""


class _Queue(NamedTuple):
    """The problem, by number of items: their total bytes, and when the last is ready (-inf for no items)."""

    nbytes: Sequence[int]
    ready_seconds: Sequence[float]


class _Arrivals(NamedTuple):
    """The solution, by number of items: when all can have arrived at the earliest, and where the last bucket begins."""

    seconds: list[float]
    starts: list[int]


def optimal_buckets(
    nbytes: Sequence[int],
    ready_seconds: Sequence[float],
    cost: AlphaBeta,
    *,
    max_bucket_bytes: int | None = None,
) -> tuple[int, ...]:
    """The plan whose last bucket arrives earliest, where the cost is a straight line.

    There is no plan with fewer buckets that arrives as early (up to rounding). From the last bucket backward, each
    takes as many items as may still arrive in time. That is optimal since the first i items, in the same buckets
    without what follows, are always done sooner by at least the time of the bytes left out.

    Args:
        nbytes: Bytes of each item, in the order of their readiness.
        ready_seconds: When each is ready, in seconds from any origin; one that is ready before its predecessor waits
            for it.
        cost: What a bucket takes.
        max_bucket_bytes: No bucket of several items has more bytes; a larger item has its own bucket.

    Returns:
        Where each bucket ends: bucket k consists of the items ``[stops[k - 1], stops[k])``, the first one of
        ``[0, stops[0])``. Linear in the number of items.

    Raises:
        ValueError: There are no items, the lengths differ, or a value is out of range.
    """
    queue = _queue(nbytes, ready_seconds)
    first_starts = _first_starts(queue, max_bucket_bytes)
    arrivals = _arrivals(queue, first_starts, cost.seconds)
    return _fewest_stops(queue, arrivals, first_starts, cost.seconds)


def _check_items(nbytes: Sequence[int], seconds: Sequence[float]) -> None:
    if not nbytes:
        raise ValueError("Invalid items: there are none. Must be at least one.")
    if len(nbytes) != len(seconds):
        raise ValueError(f"Invalid items: {len(nbytes)} sizes, but {len(seconds)} times. Must be equally many.")
    if min(nbytes) < 0:
        raise ValueError(f"Invalid size of an item: {min(nbytes)}. Must be >= 0 bytes.")
    for moment in seconds:
        if not math.isfinite(moment):
            raise ValueError(f"Invalid time of an item: {moment}. Must be finite.")


def _queue(nbytes: Sequence[int], ready_seconds: Sequence[float]) -> _Queue:
    _check_items(nbytes, ready_seconds)
    # A running maximum: an item cannot leave before those ahead of it. -inf: the first bucket waits for no other.
    return _Queue([0, *accumulate(nbytes)], [-math.inf, *accumulate(ready_seconds, max)])


def _first_starts(queue: _Queue, max_bucket_bytes: int | None) -> list[int]:
    """For each end of a bucket the first of the starts that the cap allows; all between the two are allowed, too."""
    if max_bucket_bytes is None:
        return [0] * len(queue.nbytes)
    if max_bucket_bytes < 1:
        raise ValueError(f"Invalid max_bucket_bytes: {max_bucket_bytes}. Must be >= 1.")
    starts, start = [0], 0
    for stop in range(1, len(queue.nbytes)):
        # The last item always stays: one that is larger than the cap has a bucket of its own.
        while start < stop - 1 and queue.nbytes[stop] - queue.nbytes[start] > max_bucket_bytes:
            start += 1
        starts.append(start)
    return starts


def _arrival(queue: _Queue, start: int, stop: int, drained_seconds: float, cost: Cost) -> float:
    """When the bucket ``(start, stop]`` has arrived, if the channel has been drained of what comes before it."""
    return max(drained_seconds, queue.ready_seconds[stop]) + cost(queue.nbytes[stop] - queue.nbytes[start])


def _arrivals(queue: _Queue, first_starts: Sequence[int], cost: Cost) -> _Arrivals:
    """The shortest path, which looks only at the two starts that the module derives."""
    arrivals = _Arrivals([-math.inf], [0])
    drained = 0
    for stop in range(1, len(queue.nbytes)):
        # Never goes back: ready times do not fall, so what is drained for one stop is drained for all later ones.
        while drained + 1 < stop and arrivals.seconds[drained + 1] <= queue.ready_seconds[stop]:
            drained += 1
        first = max(drained, first_starts[stop])
        # Two starts suffice (see the module). Ties take the earlier one: a larger bucket, so fewer collectives.
        seconds, start = min(
            (_arrival(queue, start, stop, arrivals.seconds[start], cost), start)
            for start in range(first, min(first + 2, stop))
        )
        arrivals.seconds.append(seconds)
        arrivals.starts.append(start)
    return arrivals


def _fewest_stops(queue: _Queue, arrivals: _Arrivals, first_starts: Sequence[int], cost: Cost) -> tuple[int, ...]:
    """Backward from the last bucket, each as long as it and what is before it can be in time; O(n) over all buckets."""
    stops, stop = [], len(arrivals.starts) - 1
    deadline = arrivals.seconds[stop]
    while stop:
        stops.append(stop)
        start = arrivals.starts[stop]
        while (
            start > first_starts[stop]
            and _arrival(queue, start - 1, stop, arrivals.seconds[start - 1], cost) <= deadline
        ):
            start -= 1
        # Rounding must not set a deadline that the items before cannot meet.
        deadline = max(arrivals.seconds[start], deadline - cost(queue.nbytes[stop] - queue.nbytes[start]))
        stop = start
    return tuple(reversed(stops))
