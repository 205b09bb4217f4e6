"""Weights that are none, or that are missing at times, are an error on all ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.errors import InconsistentWeightsError
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, Sample
from tests.strategies.gradients.trainings import KINDS, fit, strategy

Steps = list[list[list[Any]]]
"""Weights by step, micro-batch and rank."""


class Says(Regression):
    """Returns the weights that it is told."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.weights = [by_rank[dist.get_rank()] for step in steps for by_rank in step]
        self.batches = 0

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        weight = self.weights[self.batches]
        self.batches += 1
        return loss if weight is None else {"loss": loss, "loss_weight": weight}


# Each on the second of two ranks.
NO_WEIGHTS = (
    *(-1, math.nan, math.inf, -math.inf, "many", "3", [1.0], 2j, 10**400),
    *(torch.tensor([1.0, 2.0]), torch.empty(0), torch.tensor(math.nan), torch.tensor([-2]), torch.tensor(2j)),
)
BEFORE = "`training_step` returned a `loss_weight` before and none now. Return it in every step"
INVALID = "rank 1: Invalid loss_weight: "
# Weights, the number of batches by which the error comes, and a part of it on each rank.
FAILURES: list[tuple[Steps, int, tuple[str, str]]] = [
    # Ranks agree at the very first micro-batch, and then once per step.
    *(([[[2, bad], [2, 2]]], 1, (INVALID, INVALID)) for bad in NO_WEIGHTS),
    *(([[[2, 2], [2, 2]], [[2, bad], [2, 2]]], 4, (INVALID, INVALID)) for bad in NO_WEIGHTS),
    *(([[[some, None]]], 1, ("on 1 of 2 ranks; this one did. ", "this one did not. ")) for some in (0, 1)),
    ([[[1, 1], [1, None]]], 2, (f"rank 1: {BEFORE}",) * 2),
    ([[[1, 1]], [[None, 1]]], 2, (f"rank 0: {BEFORE}",) * 2),
    ([[[1, 1]], [[None, None]]], 2, (f"rank 0: {BEFORE}", f"rank 1: {BEFORE}")),
    # Where the reference is still asked for.
    ([[[0, 0], [0, None]]], 2, (f"rank 1: {BEFORE}",) * 2),
    ([[[0, 0]], [[None, None]]], 2, (f"rank 0: {BEFORE}", f"rank 1: {BEFORE}")),
]


def failures() -> list[tuple[int, str]]:
    """By how many batches the errors come, and their messages."""
    found = []
    for number, (steps, *_) in enumerate(FAILURES):
        module, said = Says(steps), ""
        try:
            chosen = strategy(KINDS[number % len(KINDS)])
            fit(module, chosen, len(module.weights), accumulate_grad_batches=len(steps[0]))
        except InconsistentWeightsError as error:
            said = str(error)
        found.append((module.batches, said))
    return found


def test_what_is_no_weight_or_missing_is_an_error_on_all_ranks(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(2, failures)):
        for (batches, said), (steps, expected, messages) in zip(found, FAILURES, strict=True):
            assert batches == expected and messages[rank] in said, (steps, said)
