"""A step is that of one big batch: short windows, weights, norms, on any number of ranks, in both strategies."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, loader, train_on_big_batches, windows_of
from tests.strategies.gradients.trainings import WEIGHTS, differences, kinds_of, ranks_batches, strategy
from tests.strategies.parity import make_trainer

CLIPS: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.2},
    {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    {},
]
# Ranks, batches of a window, batches: whole windows and short ones.
SIZES = [(1, 3, 8), (2, 1, 5), (2, 3, 8), (2, 4, 9), (3, 3, 8), (3, 4, 9)]
CASES = [(size, weighted) for weighted in (False, True) for size in SIZES]


def against_big_batches(kind: str, accumulate: int, batches: int, weighted: bool, clip: dict[str, Any]) -> Any:
    data = ranks_batches(batches, WEIGHTS if weighted else (1.0,))
    module = Regression(weighted=weighted)
    trainer = make_trainer(
        strategy(kind), accumulate_grad_batches=accumulate, max_epochs=2, use_distributed_sampler=False, **clip
    )
    trainer.fit(module, loader(data[dist.get_rank()]))
    value = clip.get("gradient_clip_algorithm") == "value"
    truth = train_on_big_batches(
        windows_of(data, accumulate) * 2,
        None if value else clip.get("gradient_clip_val"),
        max_value=clip.get("gradient_clip_val") if value else None,
    )
    return differences(module, truth, accumulate, batches)


@pytest.mark.parametrize(("number", "kind"), kinds_of(range(len(CASES)), 8))
def test_a_step_is_that_of_one_big_batch(pool: RankPool, number: int, kind: str) -> None:
    (world_size, accumulate, batches), weighted = CASES[number]
    # Each way of clipping meets whole windows and short ones, weights, and every number of ranks but one.
    clip = CLIPS[(number + (kind == "zero1")) % len(CLIPS)]
    for parameters, norms in pool.run(world_size, against_big_batches, kind, accumulate, batches, weighted, clip):
        assert parameters <= 2e-6
        assert norms <= 1e-5
