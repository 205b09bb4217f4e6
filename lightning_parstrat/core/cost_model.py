"""What a collective costs: a latency and a time per byte, and how to find the two from measurements.

R. W. Hockney, "The Communication Challenge for MPP" (1994); for collectives, with constants that depend on the number
of ranks, R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

_FEWEST_SIZES = 3
"""A line through two sizes fits whatever was measured."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """The time of a collective as a straight line over its bytes.

    Args:
        latency_seconds: What a collective of no bytes takes, in seconds, at least 0; alpha.
        seconds_per_byte: What every byte adds, in seconds, at least 0; beta.

    Raises:
        ValueError: An argument is negative or not finite.
    """

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Invalid {name}: {value}. Must be >= 0 and finite.")

    def seconds(self, nbytes: int) -> float:
        """The time of one collective.

        Args:
            nbytes: Its size in bytes, counted as in the samples of the fit, at least 0.

        Returns:
            Seconds; the latency where there are no bytes.
        """
        return self.latency_seconds + self.seconds_per_byte * nbytes


_BYTES_IN_LATENCY = {"cuda": 700 * 2**10, "cpu": 32 * 2**10}
"""What travels, for each rank, in the time that it adds to the latency of a ring: NCCL's model of nodes of 8 H100, and
Gloo's messages of 40 microseconds at some 1 GB/s."""


_RANKS_A_LEVEL = 4
"""An all-reduce between groups goes up and down a tree: each of its levels takes as long as so many ranks of a ring."""


def assumed_wire(ranks: int, device_type: str, copies: int = 1) -> AlphaBeta:
    """What a reduce-scatter is taken to cost before any was measured: latency and bandwidth in proportion only.

    Args:
        ranks: Those that share a copy of what is sharded.
        device_type: Of the gradients: "cuda" or "cpu".
        copies: Groups of so many ranks, which sum each shard between them.
    """
    in_latency = _BYTES_IN_LATENCY.get(device_type, _BYTES_IN_LATENCY["cuda"])
    # Between CPUs each rank sends all others of the same shard two messages.
    between = 2 * (copies - 1) if device_type == "cpu" else _RANKS_A_LEVEL * math.log2(copies)
    return AlphaBeta(latency_seconds=float(in_latency * (ranks + between)), seconds_per_byte=1.0)


def fit_alpha_beta(samples: Iterable[tuple[int, float]]) -> AlphaBeta:
    """The line with the least sum of relative distances from the median time of each size.

    Medians per size ignore single slow samples, absolute distances ignore sizes that do not fit. Distances are relative
    since sizes are best measured on a logarithmic grid: small ones then decide the latency and large ones the
    bandwidth. They are relative to the measured time, which forgives a size that was slow sooner than one that was
    fast, as it should be: what disturbs a measurement adds to it.

    It is an exact minimum: least absolute deviations are a linear program, so that a best line meets two of its
    constraints, each of them a point or a limit at 0. I. Barrodale and F. D. K. Roberts, "An Improved Algorithm for
    Discrete l1 Linear Approximation" (1973).

    Args:
        samples: Pairs of bytes (at least 0) and seconds (positive), in any order; several for each size.

    Returns:
        The model. Cubic in the number of distinct sizes: a few dozen are enough.

    Raises:
        ValueError: There are fewer than 3 distinct sizes, or a sample is out of range.
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        if nbytes < 0:
            raise ValueError(f"Invalid size of a sample: {nbytes}. Must be >= 0 bytes.")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"Invalid time of a sample: {seconds}. Must be > 0 seconds and finite.")
        by_size.setdefault(nbytes, []).append(seconds)
    if len(by_size) < _FEWEST_SIZES:
        raise ValueError(f"Invalid samples: {len(by_size)} distinct sizes. Must be >= {_FEWEST_SIZES}.")

    points = [(nbytes, median(times)) for nbytes, times in sorted(by_size.items())]
    return min(_lines_through(points), key=lambda line: _sum_of_distances(line, points))


def _lines_through(points: Sequence[tuple[int, float]]) -> Iterator[AlphaBeta]:
    """Every line that the linear program's optimum can be."""
    for nbytes, seconds in points:
        yield AlphaBeta(latency_seconds=seconds, seconds_per_byte=0.0)
        # A line through the origin: a point at 0 bytes does not determine its slope.
        if nbytes:
            yield AlphaBeta(latency_seconds=0.0, seconds_per_byte=seconds / nbytes)
    for (fewer, earlier), (more, later) in combinations(points, 2):
        slope = (later - earlier) / (more - fewer)
        latency = earlier - slope * fewer
        # Noise can make either negative; such a line is no feasible point of the linear program.
        if slope >= 0 and latency >= 0:
            yield AlphaBeta(latency_seconds=latency, seconds_per_byte=slope)


def _sum_of_distances(model: AlphaBeta, points: Sequence[tuple[int, float]]) -> float:
    return math.fsum(_relative_distance(model, nbytes, seconds) for nbytes, seconds in points)


def _relative_distance(model: AlphaBeta, nbytes: int, seconds: float) -> float:
    # Relative to the measurement, not to the prediction: only then is it piecewise linear in the unknowns.
    return abs(model.seconds(nbytes) / seconds - 1)
