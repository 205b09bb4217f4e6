"""How blocks are divided among the stages of a pipeline, and stages among ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline. Stage 0 has the first blocks, and the last stage computes the loss.

    Attributes:
        bounds: The first block of each stage, and the number of all blocks.
        ranks: The number of ranks.
        turns_back: Whether the second half of the stages goes back over the ranks: 0, 1, 1, 0 for two ranks. Otherwise
            stages go round: 0, 1, 0, 1.
    """

    bounds: tuple[int, ...]
    ranks: int
    turns_back: bool = False

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.bounds) - 1

    def blocks(self, stage: int) -> range:
        """The numbers of a stage's blocks."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, block: int) -> int:
        """The stage that runs a block."""
        return next(stage for stage in range(self.count) if block in self.blocks(stage))

    def rank_of(self, stage: int) -> int:
        """The rank of a stage, among the ranks of its pipeline."""
        if self.turns_back and stage >= self.ranks:
            return self.count - 1 - stage
        return stage % self.ranks

    def of_rank(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage in range(self.count) if self.rank_of(stage) == rank]


def bounds_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The bounds of stages that have so many blocks each."""
    return (0, *accumulate(sizes))


def balanced(costs: Sequence[float], stages: int, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """The bounds of stages whose most expensive one costs the least. Each stage has at least one block.

    Args:
        costs: The cost of each block, in any unit.
        stages: The number of stages, at most that of blocks.
        before: The cost of what runs before the first block.
        after: The cost of what runs after the last block.
    """
    sums = [0.0, *accumulate(costs)]
    # The best of the first blocks in so many stages: its most expensive stage, and where the last stage begins.
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for stage, end in ((s, e) for s in range(1, stages + 1) for e in range(s, len(costs) + 1)):
        extra = (before if stage == 1 else 0.0) + (after if stage == stages else 0.0)
        candidates = [
            (max(best[stage - 1, begin][0], sums[end] - sums[begin] + extra), begin)
            for begin in range(stage - 1, end)
            if (stage - 1, begin) in best
        ]
        best[stage, end] = min(candidates, default=(math.inf, 0))
    bounds = [len(costs)]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage, bounds[-1]][1])
    return tuple(reversed(bounds))


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """The number of blocks of each stage."""
    return [end - begin for begin, end in pairwise(bounds)]
