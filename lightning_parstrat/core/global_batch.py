"""How the samples of a step are cut into micro-batches, and these among ranks of unequal speed."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple


def cut(number: int, shares: Sequence[float]) -> list[int]:
    """Cuts a number into whole parts in proportion to shares, by largest remainder. Of equal ones, the first gets more.

    No part is 0 if there is enough for all: the largest gives to those with nothing.

    Args:
        number: At least 0.
        shares: Positive numbers.

    Returns:
        The parts, one for each share. Their sum is the number.
    """
    quotas = [number * share / sum(shares) for share in shares]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda one: (parts[one] - quotas[one], one))
    for one in by_remainder[: number - sum(parts)]:
        parts[one] += 1
    if number >= len(parts):
        for one in [one for one, part in enumerate(parts) if part == 0]:
            parts[parts.index(max(parts))] -= 1
            parts[one] = 1
    return parts


class Cost(NamedTuple):
    """The time of a rank's micro-batch.

    Attributes:
        seconds_per_sample: Of each sample.
        fixed_seconds: Of a micro-batch of any size.
    """

    seconds_per_sample: float
    fixed_seconds: float = 0.0

    def of(self, samples: float) -> float:
        """The seconds of a micro-batch."""
        return self.fixed_seconds + samples * self.seconds_per_sample


def cost_of(measured: Sequence[tuple[int, float]]) -> Cost:
    """The cost that explains measured micro-batches, as samples and seconds. The fixed part needs two sizes."""
    by_size: dict[int, list[float]] = {}
    for samples, seconds in measured:
        by_size.setdefault(samples, []).append(seconds)
    medians = sorted((size, sorted(times)[len(times) // 2]) for size, times in by_size.items())
    (small, less), (large, more) = medians[0], medians[-1]
    slope = (more - less) / (large - small) if large > small else 0.0
    if slope <= 0 or less - slope * small < 0:
        # Of one size, or by chance: all time counts as the samples'.
        return Cost(more / large)
    return Cost(slope, less - slope * small)


def fastest_cut(number: int, costs: Sequence[Cost], most: int) -> list[int]:
    """Cuts a micro-batch so that the slowest rank takes the least time. Each rank gets at least one sample.

    Args:
        number: Samples of the micro-batch of all ranks, at least one a rank and at most ``most`` a rank.
        costs: Of each rank.
        most: Samples that a rank gets at most.
    """
    parts = [1] * len(costs)
    heap = [(cost.of(2), rank) for rank, cost in enumerate(costs) if most > 1]
    heapq.heapify(heap)
    for _ in range(number - len(costs)):
        _, rank = heapq.heappop(heap)
        parts[rank] += 1
        if parts[rank] < most:
            heapq.heappush(heap, (costs[rank].of(parts[rank] + 1), rank))
    return parts


def time_of_equal_shares(parts: Sequence[int], costs: Sequence[Cost]) -> float:
    """How many times as long a micro-batch takes if all ranks have equally many samples. Computing alone."""
    equal = sum(parts) / len(parts)
    slowest = max(cost.of(part) for part, cost in zip(parts, costs, strict=True))
    return max(cost.of(equal) for cost in costs) / slowest


class Division:
    """Cuts an epoch's samples into steps, micro-batches, and the ranks' parts of these. All ranks cut alike.

    Attributes:
        drawn: The number of the epoch's micro-batches that were drawn.

    Args:
        step: Samples of a step.
        micro_batches: Micro-batches of a step, at most as many as it has samples.
        unit: Samples that ``drop_last`` keeps together: a micro-batch of the number of ranks that began the training.
        drop_last: Whether a rest of an epoch that is smaller than ``unit`` is dropped.
        rank: This rank.
        cuts: The ranks' shares, each with the number of the epoch's micro-batch from which on they hold.
    """

    def __init__(
        self, step: int, micro_batches: int, unit: int, drop_last: bool, rank: int, cuts: list[tuple[int, list[float]]]
    ) -> None:
        self.step, self.micro_batches, self.unit, self.cuts, self.drawn = step, micro_batches, unit, cuts, 0
        self._drop_last, self._rank = drop_last, rank
        self._samples: dict[int, int] = {}

    @property
    def parts(self) -> list[int]:
        """The ranks' samples of a micro-batch, by the latest shares."""
        return cut(self.step // self.micro_batches, self.cuts[-1][1])

    def sizes(self, samples: int) -> Iterator[int]:
        """The sizes of an epoch's micro-batches, or of those that are left of its samples at a step's begin."""
        left = samples - samples % self.unit if self._drop_last else samples
        for size in cycle(cut(self.step, [1.0] * self.micro_batches)):
            if left <= 0:
                return
            yield min(size, left)
            left -= size

    def begin(self, batches_before: int) -> None:
        """Call when a pass draws its first micro-batch.

        Args:
            batches_before: The number of its micro-batches that were drawn before a resume.
        """
        if batches_before == 0:
            self.cuts[:] = [(0, self.cuts[-1][1])]
        self.drawn = batches_before
        self._samples.clear()

    def own(self, batch: list[Any]) -> list[Any]:
        """This rank's part of the next micro-batch."""
        shares = next(shares for begin, shares in reversed(self.cuts) if begin <= self.drawn)
        parts = cut(len(batch), shares)
        begin = sum(parts[: self._rank])
        own = batch[begin : begin + parts[self._rank]]
        self._samples[self.drawn] = len(own)
        self.drawn += 1
        # No batch can be empty. This one counts nothing.
        return own or batch[:1]

    def samples(self, number: int) -> int:
        """The samples of this rank's part of a micro-batch. Those before it are forgotten."""
        self._samples = {one: samples for one, samples in self._samples.items() if one >= number}
        return self._samples[number]
