import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import pytest

from lightning_parstrat.core.bucketing import Cost, exposed_time, finish_time, lower_bound, optimal_buckets
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
    return BucketPlan(stops, finish_time(nbytes, ready, stops, cost.seconds))


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


def merge_greedily(problem: Problem) -> Plan:
    """MG-WFBP, algorithm 1: an item joins the next one if what it waits for it is less than a latency."""
    nbytes, ready, cost = problem
    stops: list[int] = []
    channel_free, start = -math.inf, 0
    for stop in range(1, len(nbytes)):
        begin = max(channel_free, ready[stop - 1])
        if ready[stop] - begin >= cost.latency_seconds:
            stops.append(stop)
            channel_free = begin + cost.seconds(sum(nbytes[start:stop]))
            start = stop
    return (*stops, len(nbytes))


def test_plans_are_optimal() -> None:
    for generator, (nbytes, ready, cost) in draw_many(1, 3000):
        cap = draw_cap(generator)
        best = min(simulate(nbytes, ready, stops, cost.seconds) for stops in allowed_plans(nbytes, cap))
        for plan in (
            solve(nbytes, ready, cost, max_bucket_bytes=cap),
            solve(nbytes, ready, cost, max_bucket_bytes=cap, fewest=True),
        ):
            assert plan.finish_seconds == best == simulate(nbytes, ready, plan.stops, cost.seconds)
            assert plan.stops in allowed_plans(nbytes, cap)


def test_there_are_no_fewer_buckets_that_arrive_as_early() -> None:
    fewer = 0
    for generator, (nbytes, ready, cost) in draw_many(3, 2000):
        cap = draw_cap(generator)
        outcomes = [(simulate(nbytes, ready, stops, cost.seconds), len(stops)) for stops in allowed_plans(nbytes, cap)]
        plan = solve(nbytes, ready, cost, max_bucket_bytes=cap, fewest=True)
        assert (plan.finish_seconds, len(plan.stops)) == min(outcomes)
        fewer += len(plan.stops) < len(solve(nbytes, ready, cost, max_bucket_bytes=cap).stops)
    assert fewer > 40


def test_unless_fewest_every_beginning_arrives_as_early_as_it_can() -> None:
    for generator, (nbytes, ready, cost) in draw_many(4, 300, most_items=12):
        cap = draw_cap(generator)
        stops = solve(nbytes, ready, cost, max_bucket_bytes=cap).stops
        for index, stop in enumerate(stops):
            alone = solve(nbytes[:stop], ready[:stop], cost, max_bucket_bytes=cap)
            assert finish_time(nbytes[:stop], ready[:stop], stops[: index + 1], cost.seconds) == alone.finish_seconds


def test_never_worse_than_greedy_merging_and_often_better() -> None:
    better = 0
    for _, problem in draw_many(5, 1000, most_items=20):
        nbytes, ready, cost = problem
        # The paper's items become ready one after the other.
        ready = sorted(ready)
        greedy = simulate(nbytes, ready, merge_greedily(Problem(nbytes, ready, cost)), cost.seconds)
        finish = solve(nbytes, ready, cost).finish_seconds
        assert finish <= greedy
        better += finish < greedy
    assert better > 50


def test_many_items_of_any_size_arrive_as_early_as_they_can() -> None:
    generator = random.Random(6)
    for cap in (None, 10**6):
        nbytes = [int(10 ** generator.uniform(0, 6)) for _ in range(250)]
        ready = list(accumulate(generator.expovariate(1e3) for _ in nbytes))
        cost = AlphaBeta(latency_seconds=8e-4, seconds_per_byte=generator.uniform(3e-9, 1e-8))
        earliest = earliest_arrival(nbytes, ready, cost.seconds, cap)
        plan = solve(nbytes, ready, cost, max_bucket_bytes=cap)
        fewest = solve(nbytes, ready, cost, max_bucket_bytes=cap, fewest=True)
        assert plan.finish_seconds == pytest.approx(earliest, rel=1e-12)
        assert fewest.finish_seconds == pytest.approx(earliest, rel=1e-12)
        assert 1 < len(fewest.stops) <= len(plan.stops) < len(nbytes)


@pytest.mark.parametrize("cap", [None, 100])
@pytest.mark.parametrize("fewest", [False, True])
def test_a_straight_line_takes_linear_time(monkeypatch: pytest.MonkeyPatch, cap: int | None, fewest: bool) -> None:
    calls = 0
    seconds = AlphaBeta.seconds

    def count(model: AlphaBeta, nbytes: int) -> float:
        nonlocal calls
        calls += 1
        return seconds(model, nbytes)

    monkeypatch.setattr(AlphaBeta, "seconds", count)
    nbytes = [1 + index % 7 for index in range(5000)]
    optimal_buckets(nbytes, [4.0 * index for index in range(5000)], UNIT, max_bucket_bytes=cap, fewest=fewest)
    # Two candidates for each; then the plan itself, and backward three at most for each of its buckets or items.
    assert calls <= 6 * len(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "ready", "expected"),
    [
        pytest.param([5], [3.0], BucketPlan((1,), 10.0), id="one item"),
        pytest.param([1, 1, 1], [0.0, 0.0, 0.0], BucketPlan((3,), 5.0), id="ready at once"),
        pytest.param([4, 1], [0.0, 6.0], BucketPlan((1, 2), 9.0), id="the channel is free again in time"),
        pytest.param([4, 1], [0.0, 1.0], BucketPlan((2,), 8.0), id="waiting is shorter than a latency"),
        pytest.param([4, 1], [0.0, 3.0], BucketPlan((1, 2), 9.0), id="waiting is longer than a latency"),
        pytest.param([4, 1], [3.0, 0.0], BucketPlan((2,), 10.0), id="ready before its predecessor"),
        pytest.param([0, 0], [0.0, 9.0], BucketPlan((1, 2), 11.0), id="nothing to send"),
        pytest.param([4, 1], [-9.0, -3.0], BucketPlan((1, 2), 0.0), id="before the origin"),
    ],
)
def test_by_hand(nbytes: list[int], ready: list[float], expected: BucketPlan) -> None:
    assert solve(nbytes, ready, UNIT) == expected


def test_greedy_merging_looks_no_further_than_the_next_item() -> None:
    # Each of the first three waits for the next less than a latency, but together they keep the last one waiting.
    problem = Problem([8, 1, 1, 1], [0.0, 1.0, 2.0, 9.0], UNIT)
    assert merge_greedily(problem) == (3, 4)
    assert finish_time(*problem[:2], (3, 4), UNIT.seconds) == 17.0
    assert solve(*problem) == BucketPlan((1, 4), 15.0)


def test_fewest_by_hand() -> None:
    # Whatever is sent before the last item is ready costs nothing.
    nbytes, ready = [1, 1, 1, 1], [0.0, 10.0, 20.0, 30.0]
    assert solve(nbytes, ready, UNIT) == BucketPlan((1, 2, 3, 4), 33.0)
    assert solve(nbytes, ready, UNIT, fewest=True) == BucketPlan((3, 4), 33.0)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        pytest.param(1, BucketPlan((1, 2, 3, 4), 20.0), id="every item exceeds it"),
        pytest.param(4, BucketPlan((1, 2, 4), 18.0), id="one item exceeds it"),
        pytest.param(8, BucketPlan((2, 4), 16.0), id="exactly full"),
        pytest.param(12, BucketPlan((4,), 14.0), id="all together"),
    ],
)
def test_capped_by_hand(cap: int, expected: BucketPlan) -> None:
    nbytes, ready = [3, 5, 2, 2], [0.0] * 4
    assert solve(nbytes, ready, UNIT, max_bucket_bytes=cap, fewest=True) == expected


def test_more_of_anything_never_helps() -> None:
    for generator, (nbytes, ready, cost) in draw_many(7, 300, most_items=15):
        finish = solve(nbytes, ready, cost).finish_seconds
        item = generator.randrange(len(nbytes))
        heavier = [size + (index == item) for index, size in enumerate(nbytes)]
        later = [moment + (index == item) for index, moment in enumerate(ready)]
        slower = AlphaBeta(latency_seconds=cost.latency_seconds + 1, seconds_per_byte=cost.seconds_per_byte)
        narrower = AlphaBeta(latency_seconds=cost.latency_seconds, seconds_per_byte=cost.seconds_per_byte + 0.25)
        assert solve(heavier, ready, cost).finish_seconds >= finish
        assert solve(nbytes, later, cost).finish_seconds >= finish
        assert solve(nbytes, ready, slower).finish_seconds >= finish
        assert solve(nbytes, ready, narrower).finish_seconds >= finish
        caps = [solve(nbytes, ready, cost, max_bucket_bytes=cap).finish_seconds for cap in (1, 5, 20, 10**6)]
        assert caps == sorted(caps, reverse=True)
        assert caps[-1] == finish


def test_the_times_of_any_plan() -> None:
    for generator, (nbytes, ready, cost) in draw_many(9, 500, most_items=10):
        stops = (*(cut for cut in range(1, len(nbytes)) if generator.random() < 0.5), len(nbytes))
        finish = finish_time(nbytes, ready, stops, cost.seconds)
        assert finish == simulate(nbytes, ready, stops, cost.seconds)
        assert exposed_time(nbytes, ready, stops, cost.seconds) == finish - max(ready)


def test_the_lower_bound_is_one_and_at_times_met() -> None:
    met = 0
    for _, (nbytes, ready, cost) in draw_many(10, 800, most_items=15):
        exposed = solve(nbytes, ready, cost).finish_seconds - max(ready)
        bound = lower_bound(nbytes, ready, cost)
        assert cost.seconds(nbytes[-1]) <= bound <= exposed
        met += bound == exposed
        no_latency = AlphaBeta(latency_seconds=0.0, seconds_per_byte=cost.seconds_per_byte)
        exposed = solve(nbytes, ready, no_latency).finish_seconds - max(ready)
        assert lower_bound(nbytes, ready, no_latency) == exposed
        assert lower_bound(nbytes, [3.0] * len(nbytes), cost) == cost.seconds(sum(nbytes))
    assert met > 400


def test_the_lower_bound_holds_where_items_are_cut() -> None:
    for _, (nbytes, ready, cost) in draw_many(11, 300):
        in_order = accumulate(ready, max)
        moments = [moment for size, moment in zip(nbytes, in_order, strict=True) for _ in range(size)]
        if nbytes[-1]:
            exposed = solve([1] * len(moments), moments, cost).finish_seconds - max(ready)
            assert lower_bound(nbytes, ready, cost) <= exposed


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        pytest.param([0.0, 0.0], 7.0, id="ready at once: all bytes and a latency"),
        pytest.param([0.0, 1.0], 7.0, id="waiting is shorter than a latency: all bytes and a latency"),
        pytest.param([0.0, 4.0], 5.0, id="waiting is longer: all bytes and two latencies, less what is hidden"),
        pytest.param([0.0, 99.0], 3.0, id="all is hidden but the last item"),
    ],
)
def test_the_lower_bound_by_hand(ready: list[float], expected: float) -> None:
    assert lower_bound([4, 1], ready, UNIT) == expected


Solver = Callable[[Sequence[int], Sequence[float]], Any]
SOLVERS: dict[str, Solver] = {
    "optimal_buckets": lambda nbytes, seconds: optimal_buckets(nbytes, seconds, UNIT),
    "finish_time": lambda nbytes, seconds: finish_time(nbytes, seconds, [len(nbytes)], UNIT.seconds),
    "exposed_time": lambda nbytes, seconds: exposed_time(nbytes, seconds, [len(nbytes)], UNIT.seconds),
    "lower_bound": lambda nbytes, seconds: lower_bound(nbytes, seconds, UNIT),
}


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=list(SOLVERS))
@pytest.mark.parametrize(
    ("nbytes", "seconds", "message"),
    [
        ([], [], "there are none"),
        ([1, 2], [0.0], "2 sizes, but 1 times"),
        ([1, -2], [0.0, 1.0], "-2"),
        ([1, 2], [0.0, math.inf], "inf"),
        ([1, 2], [math.nan, 1.0], "nan"),
    ],
)
def test_items_that_are_no_problem(solver: Solver, nbytes: list[int], seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solver(nbytes, seconds)


@pytest.mark.parametrize("stops", [(), (2,), (0, 3), (2, 1, 3), (1, 1, 3), (4,)], ids=str)
@pytest.mark.parametrize("measure", [finish_time, exposed_time])
def test_stops_that_are_no_plan(measure: Callable[..., float], stops: Plan) -> None:
    with pytest.raises(ValueError, match="Invalid stops"):
        measure([1, 1, 1], [0.0, 1.0, 2.0], stops, UNIT.seconds)


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_that_is_none(cap: int) -> None:
    with pytest.raises(ValueError, match="Invalid max_bucket_bytes"):
        optimal_buckets([1], [0.0], UNIT, max_bucket_bytes=cap)
