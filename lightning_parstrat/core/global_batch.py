"""How the samples of a step are cut into micro-batches, and these among ranks of unequal speed."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle
from typing import NamedTuple


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


@dataclass(frozen=True, kw_only=True)
class GlobalBatches:
    """The samples of all ranks in an epoch: how many a step has, and in how many micro-batches it has them.

    Attributes:
        step: Samples of a step.
        unit: Samples that ``drop_last`` keeps together: a micro-batch of the number of ranks that began the training.
        micro_batches: Micro-batches of a step, at most as many as it has samples.
    """

    step: int
    unit: int
    micro_batches: int

    def sizes(self, samples: int, drop_last: bool) -> Iterator[int]:
        """The sizes of an epoch's micro-batches, or of those that are left of it at a step's begin.

        Args:
            samples: The number of samples.
            drop_last: Whether a rest that is smaller than ``unit`` is dropped.
        """
        left = samples - samples % self.unit if drop_last else samples
        for size in cycle(self._of_step):
            if left <= 0:
                return
            yield min(size, left)
            left -= size

    def length(self, samples: int, drop_last: bool) -> int:
        """The number of these micro-batches."""
        kept = samples - samples % self.unit if drop_last else samples
        rest, ends = kept % self.step, accumulate(self._of_step)
        before = chain([0], ends)
        return kept // self.step * len(self._of_step) + sum(begin < rest for begin in list(before)[:-1])

    @property
    def _of_step(self) -> list[int]:
        return cut(self.step, [1.0] * self.micro_batches)
