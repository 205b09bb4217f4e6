import math
import random
from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import pytest

from lightning_parstrat.core.cost_model import AlphaBeta, fit_alpha_beta

SIZES = tuple(2**exponent for exponent in range(10, 27))
TRUTH = AlphaBeta(latency_seconds=40e-6, seconds_per_byte=1e-10)


def measure(
    generator: random.Random, model: AlphaBeta, *, repeats: int, noise: float, slow: float = 0.0
) -> list[tuple[int, float]]:
    """Samples with a relative error up to ``noise``; a fraction ``slow`` of them takes ten times as long."""
    return [
        (size, model.seconds(size) * (1 + generator.uniform(-noise, noise)) * (10 if generator.random() < slow else 1))
        for size in SIZES
        for _ in range(repeats)
    ]


def sum_of_distances(latency: float, slope: float, points: Sequence[tuple[int, float]]) -> float:
    return sum(abs((latency + slope * nbytes) / seconds - 1) for nbytes, seconds in points)


def test_the_time_is_the_latency_and_the_bytes() -> None:
    model = AlphaBeta(latency_seconds=3.0, seconds_per_byte=0.5)
    assert [model.seconds(nbytes) for nbytes in (0, 1, 10)] == [3.0, 3.5, 8.0]


def test_a_model_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        TRUTH.latency_seconds = 1.0  # type: ignore[misc]


def test_a_model_that_cannot_be() -> None:
    for name in ("latency_seconds", "seconds_per_byte"):
        for value in (-1e-9, math.inf, math.nan):
            with pytest.raises(ValueError, match=f"Invalid {name}"):
                AlphaBeta(**{"latency_seconds": 1.0, "seconds_per_byte": 1.0, name: value})


def test_samples_on_a_line_give_the_line() -> None:
    for latency, slope in ((3.0, 0.5), (0.0, 0.25), (2.0, 0.0)):
        samples = [(nbytes, latency + slope * nbytes) for nbytes in (1024, 1, 64, 8)]
        assert fit_alpha_beta(samples) == AlphaBeta(latency_seconds=latency, seconds_per_byte=slope)
    # The medians are 2, 3 and 9. The line through the outer two is off by 0.75 of 3, through the first two by 4 of 9.
    model = fit_alpha_beta([(2, 30.0), (0, 2.0), (2, 1.0), (2, 3.0), (8, 9.0)])
    assert model == AlphaBeta(latency_seconds=2.0, seconds_per_byte=0.875)


def test_neither_constant_falls_below_zero() -> None:
    # Faster with more bytes, and a line that would begin below zero.
    for points in ([(0, 5.0), (4, 3.0), (8, 1.0), (16, 0.5)], [(1, 1.0), (2, 10.0), (4, 40.0), (8, 100.0)]):
        model = fit_alpha_beta(points)
        assert min(model.latency_seconds, model.seconds_per_byte) == 0
        assert max(model.latency_seconds, model.seconds_per_byte) > 0


def test_no_other_line_is_nearer() -> None:
    generator = random.Random(1)
    for _ in range(100):
        sizes = generator.sample(range(1, 100), generator.randint(3, 8))
        points = [(size, generator.uniform(0.1, 1.0) * (1 + size)) for size in sizes]
        model = fit_alpha_beta(points)
        best = sum_of_distances(model.latency_seconds, model.seconds_per_byte, points)
        for _ in range(50):
            latency, slope = generator.uniform(0, 30), generator.uniform(0, 1.5)
            near = 1 + generator.uniform(-0.1, 0.1)
            assert best <= sum_of_distances(latency, slope, points) + 1e-9
            assert best <= sum_of_distances(model.latency_seconds * near, model.seconds_per_byte, points) + 1e-9
            assert best <= sum_of_distances(model.latency_seconds, model.seconds_per_byte * near, points) + 1e-9


def test_noise_and_slow_samples_do_not_matter() -> None:
    generator = random.Random(2)
    for _ in range(20):
        model = fit_alpha_beta(measure(generator, TRUTH, repeats=9, noise=0.1, slow=0.15))
        assert model.latency_seconds == pytest.approx(TRUTH.latency_seconds, rel=0.1)
        assert model.seconds_per_byte == pytest.approx(TRUTH.seconds_per_byte, rel=0.1)


def test_a_fifth_of_the_sizes_may_be_slow_wherever_they_are() -> None:
    generator = random.Random(3)
    for number in range(100):
        slow, factor = set(generator.sample(SIZES, len(SIZES) // 5)), (2.0, 20.0)[number % 2]
        model = fit_alpha_beta([(size, TRUTH.seconds(size) * (factor if size in slow else 1)) for size in SIZES])
        assert model.latency_seconds == pytest.approx(TRUTH.latency_seconds, rel=0.02)
        assert model.seconds_per_byte == pytest.approx(TRUTH.seconds_per_byte, rel=0.02)


def test_units_and_order_do_not_matter() -> None:
    generator = random.Random(5)
    samples = measure(generator, TRUTH, repeats=3, noise=0.2)
    model = fit_alpha_beta(samples)
    shuffled = generator.sample(samples, len(samples))
    scaled = fit_alpha_beta((nbytes * 4, seconds * 1024) for nbytes, seconds in shuffled)
    assert scaled.latency_seconds == model.latency_seconds * 1024
    assert scaled.seconds_per_byte == model.seconds_per_byte * 256


def test_samples_that_tell_nothing() -> None:
    for samples, message in [
        ([], "0 distinct sizes"),
        ([(8, 1.0), (16, 2.0), (8, 1.5), (16, 2.5)], "2 distinct sizes"),
        ([(1, 1.0), (2, 2.0), (-3, 3.0)], "-3"),
        ([(1, 1.0), (2, 0.0), (3, 3.0)], r"0\.0"),
        ([(1, 1.0), (2, -2.0), (3, 3.0)], r"-2\.0"),
        ([(1, 1.0), (2, math.inf), (3, 3.0)], "inf"),
        ([(1, 1.0), (2, math.nan), (3, 3.0)], "nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit_alpha_beta(samples)
