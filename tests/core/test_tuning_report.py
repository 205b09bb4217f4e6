"""What the tuning has found can be read by users, by programs, and by the next training."""

import json
import random
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import pytest

from lightning_parstrat.core.bucketing import finish_time
from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.core.tuning import Plan, Problem
from lightning_parstrat.core.tuning_report import (
    FORMAT,
    BucketTimes,
    Measured,
    TuningReport,
    bucket_times,
    gradient_times,
)

SHORTEST = TuningReport(verdict="not tuned", reason="there is one parameter", world_size=2)
FULL = TuningReport(
    verdict="tuned",
    reason="the planned buckets gain 12.5% of a step",
    caps=(2**20, 3 * 2**19, 25 * 2**20 + 1),
    world_size=4,
    cost=AlphaBeta(latency_seconds=1.5e-4, seconds_per_byte=2.5e-9),
    load=1.7,
    spread=0.1,
    backward_seconds=0.0311,
    default=Measured(0.08, 0.0123),
    planned=Measured(0.07, 0.0045),
    predicted_default_seconds=0.0133,
    predicted_planned_seconds=0.0055,
    bound_seconds=0.0021,
    default_buckets=(BucketTimes(3, 2**20, 0.01, 0.01, 0.02),),
    planned_buckets=(BucketTimes(1, 2**19, 0.004, 0.004, 0.007), BucketTimes(2, 2**19, 0.01, 0.01, 0.013)),
    gradients=((0.0, 0), (0.004, 2**19), (0.01, 2**19)),
    steps=33,
    overhead_seconds=0.456,
    from_cache=True,
)
REPORTS = {
    "shortest": SHORTEST,
    "full": FULL,
    "default is best": replace(FULL, verdict="default is best", caps=None, planned=None, from_cache=False),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=list(REPORTS))
def test_it_comes_back_from_json_as_it_was(report: TuningReport) -> None:
    read = TuningReport.from_json(json.loads(report.as_text()))
    assert read == report
    # Types, too: tuples compare equal to named ones.
    assert repr(read) == repr(report)


def test_the_full_report_leaves_nothing_out() -> None:
    assert all(getattr(FULL, field.name) != field.default for field in fields(TuningReport))


FOREIGN = {
    "empty": {},
    "something else": {"state_dict": {}},
    "of no format": {name: value for name, value in FULL.as_json().items() if name != "format"},
    "of the next format": {**FULL.as_json(), "format": FORMAT + 1},
}


@pytest.mark.parametrize("values", FOREIGN.values(), ids=list(FOREIGN))
def test_what_is_of_another_format_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"of format {values.get('format')!r}; this version reads {FORMAT}"):
        TuningReport.from_json(values)


MISSING = ("verdict", "reason", "caps", "world_size", "cost", "default", "default_buckets", "gradients")
WRONG = (
    ("verdict", "fastest"),
    ("caps", 5),
    ("caps", []),
    ("caps", "big"),
    ("caps", [1.5]),
    ("caps", [0]),
    ("caps", [True]),
    ("cost", [1.0, 2.0]),
    ("cost", {"latency_seconds": 1.0}),
    ("cost", {"latency_seconds": -1.0, "seconds_per_byte": 0.0}),
    ("cost", {"latency_seconds": "1", "seconds_per_byte": 0.0}),
    ("default", 5.0),
    ("planned", [1.0, 2.0, 3.0]),
    ("planned_buckets", None),
    ("default_buckets", [[1, 2]]),
    ("gradients", [[1.0]]),
)


@pytest.mark.parametrize(
    "values",
    [
        *(
            pytest.param({one: value for one, value in FULL.as_json().items() if one != name}, id=f"no {name}")
            for name in MISSING
        ),
        *(pytest.param({**FULL.as_json(), name: value}, id=f"{name}: {value}") for name, value in WRONG),
    ],
)
def test_what_is_damaged_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TuningReport.from_json(json.loads(json.dumps(values)))


def test_the_plan_can_be_given_to_a_later_training() -> None:
    assert FULL.bucket_cap_mb == [1.0, 1.5, 25 + 2**-20]
    assert FULL.as_json()["bucket_cap_mb"] == FULL.bucket_cap_mb
    assert SHORTEST.bucket_cap_mb is None


def test_the_log_says_what_was_found() -> None:
    verdict, wire, default, planned, bound, effort = FULL.lines()
    assert verdict == FULL.headline == "buckets are tuned (from the cache): the planned buckets gain 12.5% of a step"
    assert str(FULL).split("\n") == FULL.lines()
    for part in ("4 ranks", "0.15 ms", "2.5 ns a byte", "31.10 ms"):
        assert part in wire
    for part in ("default: 1 bucket,", "80.00 ms", "12.30 ms", "13.30 ms by the model"):
        assert part in default
    for part in ("planned: 2 buckets,", "70.00 ms", "4.50 ms", "5.50 ms by the model"):
        assert part in planned
    assert "2.10 ms" in bound
    assert "33 steps" in effort and "0.46 s" in effort


def test_the_log_says_nothing_of_what_was_not_measured() -> None:
    assert SHORTEST.lines() == ["buckets are not tuned: there is one parameter"]
    lines = replace(FULL, planned=None, predicted_default_seconds=None, default_buckets=(), from_cache=False).lines()
    assert lines[0].startswith("buckets are tuned: ")
    assert not any("planned: " in line for line in lines)
    assert "by the model" not in lines[2]


def test_the_last_bucket_arrives_when_the_model_says() -> None:
    generator = random.Random(1)
    for _ in range(200):
        count = generator.randint(1, 20)
        nbytes = [generator.randint(1, 10**6) for _ in range(count)]
        ready = [generator.uniform(0, 0.01) for _ in range(count)]
        order = generator.sample(range(count), count)
        stops = (*(cut for cut in range(1, count) if generator.random() < 0.4), count)
        buckets = tuple(tuple(order[a:b]) for a, b in zip((0, *stops), stops, strict=False))
        cost = AlphaBeta(latency_seconds=generator.uniform(0, 1e-3), seconds_per_byte=generator.uniform(0, 1e-8))
        problem = Problem(nbytes, ready, order, lambda _, given=buckets: [list(bucket) for bucket in given])
        times = bucket_times(problem, Plan(None, buckets, 0.0), cost)
        in_order = [nbytes[index] for index in order], [ready[index] for index in order]
        for number, (stop, bucket) in enumerate(zip(stops, times, strict=True)):
            before = (in_order[0][:stop], in_order[1][:stop])
            assert bucket.end_seconds == finish_time(*before, stops[: number + 1], cost.seconds)
            assert bucket.ready_seconds == max(before[1])
            assert bucket.end_seconds - bucket.begin_seconds == pytest.approx(cost.seconds(bucket.nbytes))
        assert [bucket.parameters for bucket in times] == [len(bucket) for bucket in buckets]
        assert list(accumulate(bucket.nbytes for bucket in times))[-1] == sum(nbytes)


def test_gradients_are_listed_as_they_become_ready() -> None:
    assert gradient_times([4, 8, 2], [0.3, 0.1, 0.2]) == ((0.1, 8), (0.2, 2), (0.3, 4))
