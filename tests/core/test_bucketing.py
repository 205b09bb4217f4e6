import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import pytest

from lightning_parstrat.core.bucketing import Cost, optimal_buckets
from lightning_parstrat.core.cost_model import AlphaBeta

Plan = tuple[int, ...]
UNIT = AlphaBeta(latency_seconds=2.0, seconds_per_byte=1.0)


class BucketPlan(NamedTuple):
    stops: Plan
    finish_seconds: float


class Problem(NamedTuple):
    """All numbers are small multiples of 1/4, so that sums of them are exact, and equal where they should be."""

    nbytes: list[int]
    ready: list[float]
    cost: AlphaBeta


def draw(generator: random.Random, most_items: int = 8) -> Problem:
    count = generator.randint(1, most_items)
    pace = generator.choice((0, 2, 8, 20))
    ready = list(accumulate(generator.randint(0, pace) / 2 for _ in range(count)))
    if generator.random() < 0.2:
        generator.shuffle(ready)
    nbytes = [generator.choice((0, 1, generator.randint(0, 6), generator.randint(0, 30))) for _ in range(count)]
    cost = AlphaBeta(
        latency_seconds=generator.randint(0, 12) / 2, seconds_per_byte=generator.choice((0.0, 0.25, 0.5, 1.0))
    )
    return Problem(nbytes, ready, cost)


def draw_many(seed: int, count: int, most_items: int = 8) -> Iterator[tuple[random.Random, Problem]]:
    generator = random.Random(seed)
    for _ in range(count):
        yield generator, draw(generator, most_items)


def draw_cap(generator: random.Random) -> int | None:
    return generator.choice((None, generator.randint(1, 40)))


def solve(nbytes: Sequence[int], ready: Sequence[float], cost: AlphaBeta, **options: Any) -> BucketPlan:
    stops = optimal_buckets(nbytes, ready, cost, **options)
    return BucketPlan(stops, simulate(nbytes, ready, stops, cost.seconds))


def every_plan(count: int) -> Iterator[Plan]:
    for cuts in range(count):
        for stops in combinations(range(1, count), cuts):
            yield (*stops, count)


def allowed_plans(nbytes: Sequence[int], cap: int | None) -> Iterator[Plan]:
    for stops in every_plan(len(nbytes)):
        buckets = pairwise((0, *stops))
        if cap is None or all(stop - start == 1 or sum(nbytes[start:stop]) <= cap for start, stop in buckets):
            yield stops


def simulate(nbytes: Sequence[int], ready: Sequence[float], stops: Plan, cost: Cost) -> float:
    """The problem as it is stated, without prefixes."""
    channel_free = -math.inf
    for start, stop in pairwise((0, *stops)):
        begin = max(channel_free, *ready[start:stop])
        channel_free = begin + cost(sum(nbytes[start:stop]))
    return channel_free


def earliest_arrival(nbytes: Sequence[int], ready: Sequence[float], cost: Cost, cap: int | None) -> float:
    """The shortest path over all starts of each bucket, for more items than there are plans to try."""
    before = [0, *accumulate(nbytes)]
    arrived = [-math.inf]
    for stop, moment in enumerate(accumulate(ready, max), start=1):
        arrived.append(
            min(
                max(arrived[start], moment) + cost(before[stop] - before[start])
                for start in range(stop)
                if cap is None or stop - start == 1 or before[stop] - before[start] <= cap
            )
        )
    return arrived[-1]


def test_plans_are_optimal() -> None:
    for generator, (nbytes, ready, cost) in draw_many(1, 3000):
        cap = draw_cap(generator)
        best = min(simulate(nbytes, ready, stops, cost.seconds) for stops in allowed_plans(nbytes, cap))
        plan = solve(nbytes, ready, cost, max_bucket_bytes=cap)
        assert plan.finish_seconds == best == simulate(nbytes, ready, plan.stops, cost.seconds)
        assert plan.stops in allowed_plans(nbytes, cap)


def test_there_are_no_fewer_buckets_that_arrive_as_early() -> None:
    for generator, (nbytes, ready, cost) in draw_many(3, 2000):
        cap = draw_cap(generator)
        outcomes = [(simulate(nbytes, ready, stops, cost.seconds), len(stops)) for stops in allowed_plans(nbytes, cap)]
        plan = solve(nbytes, ready, cost, max_bucket_bytes=cap)
        assert (plan.finish_seconds, len(plan.stops)) == min(outcomes)


def test_many_items_of_any_size_arrive_as_early_as_they_can() -> None:
    generator = random.Random(6)
    for cap in (None, 10**6):
        nbytes = [int(10 ** generator.uniform(0, 6)) for _ in range(250)]
        ready = list(accumulate(generator.expovariate(1e3) for _ in nbytes))
        cost = AlphaBeta(latency_seconds=8e-4, seconds_per_byte=generator.uniform(3e-9, 1e-8))
        earliest = earliest_arrival(nbytes, ready, cost.seconds, cap)
        plan = solve(nbytes, ready, cost, max_bucket_bytes=cap)
        assert plan.finish_seconds == pytest.approx(earliest, rel=1e-12)
        assert 1 < len(plan.stops) < len(nbytes)


def test_a_straight_line_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    seconds = AlphaBeta.seconds

    def count(model: AlphaBeta, nbytes: int) -> float:
        nonlocal calls
        calls += 1
        return seconds(model, nbytes)

    monkeypatch.setattr(AlphaBeta, "seconds", count)
    nbytes = [1 + index % 7 for index in range(5000)]
    for cap in (None, 100):
        calls = 0
        optimal_buckets(nbytes, [4.0 * index for index in range(5000)], UNIT, max_bucket_bytes=cap)
        # Two candidates for each; then the plan itself, and backward three at most for each of its buckets or items.
        assert calls <= 6 * len(nbytes)


BY_HAND: dict[str, tuple[list[int], list[float], BucketPlan]] = {
    "one item": ([5], [3.0], BucketPlan((1,), 10.0)),
    "ready at once": ([1, 1, 1], [0.0, 0.0, 0.0], BucketPlan((3,), 5.0)),
    "the channel is free again in time": ([4, 1], [0.0, 6.0], BucketPlan((1, 2), 9.0)),
    "waiting is shorter than a latency": ([4, 1], [0.0, 1.0], BucketPlan((2,), 8.0)),
    "ready before its predecessor": ([4, 1], [3.0, 0.0], BucketPlan((2,), 10.0)),
    "nothing to send": ([0, 0], [0.0, 9.0], BucketPlan((2,), 11.0)),
}


def test_by_hand() -> None:
    for name, (nbytes, ready, expected) in BY_HAND.items():
        assert solve(nbytes, ready, UNIT) == expected, name
    # Whatever is sent before the last item is ready costs nothing.
    nbytes, ready = [1, 1, 1, 1], [0.0, 10.0, 20.0, 30.0]
    assert solve(nbytes, ready, UNIT) == BucketPlan((3, 4), 33.0)
    # Every item exceeds the cap, or one does; exactly full; all together.
    for cap, stops in ((1, (1, 2, 3, 4)), (4, (1, 2, 4)), (8, (2, 4)), (12, (4,))):
        assert solve([3, 5, 2, 2], [0.0] * 4, UNIT, max_bucket_bytes=cap).stops == stops


def test_what_is_no_problem_is_refused() -> None:
    for nbytes, seconds, message in [
        ([], [], "there are none"),
        ([1, 2], [0.0], "2 sizes, but 1 times"),
        ([1, -2], [0.0, 1.0], "-2"),
        ([1, 2], [0.0, math.inf], "inf"),
        ([1, 2], [math.nan, 1.0], "nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimal_buckets(nbytes, seconds, UNIT)
    for cap in (0, -1):
        with pytest.raises(ValueError, match="Invalid max_bucket_bytes"):
            optimal_buckets([1], [0.0], UNIT, max_bucket_bytes=cap)
