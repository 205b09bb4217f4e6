"""A step is that of one big batch: short windows, weights, norms, on any number of ranks, in both strategies."""

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import lightning_parstrat
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Regression, Truth, samples, train_on_big_batches, windows_of
from tests.strategies.parity import make_trainer, zero1

CLIP = 0.2
WEIGHTS = (3.0, 0.0, 11.0, 512.0, 1.0, 40.0, 7.0)


def strategy(kind: str, **arguments: Any) -> Any:
    if kind == "ddp_tuned":
        return lightning_parstrat.TunedDDPStrategy(**arguments)
    return zero1(**{"expose_gradients": kind == "exposed", "partial_window": "exact", **arguments})


def ranks_batches(batches: int, weights: tuple[float, ...] = (1.0,)) -> list[list[big_batch.Sample]]:
    return [
        samples(batches, seed=rank, weights=weights[rank:] + weights[:rank]) for rank in range(dist.get_world_size())
    ]


def steps(module: Regression, accumulate: int, batches: int) -> tuple[list[Tensor], list[float]]:
    """Parameters and norms after the batches that end a window."""
    ends = [i for i in range(len(module.seen)) if (i % batches + 1) % accumulate == 0 or i % batches == batches - 1]
    return [module.seen[i] for i in ends], [module.norms[i] for i in ends]


def differences(module: Regression, truth: Truth, accumulate: int, batches: int) -> tuple[float, float]:
    parameters, norms = steps(module, accumulate, batches)
    assert len(parameters) == len(truth.parameters)
    largest = max(float((a - b).abs().max()) for a, b in zip(parameters, truth.parameters, strict=True))
    known = [(a, b) for a, b in zip(norms, truth.norms, strict=True) if not math.isnan(a + b)]
    return largest, max((abs(a - b) / b for a, b in known), default=0.0)


def against_big_batches(kind: str, accumulate: int, batches: int, weighted: bool, clip: dict[str, Any]) -> Any:
    data = ranks_batches(batches, WEIGHTS if weighted else (1.0,))
    module = Regression(weighted=weighted)
    trainer = make_trainer(
        strategy(kind), accumulate_grad_batches=accumulate, max_epochs=2, use_distributed_sampler=False, **clip
    )
    trainer.fit(module, big_batch.loader(data[dist.get_rank()]))
    value = clip.get("gradient_clip_algorithm") == "value"
    truth = train_on_big_batches(
        windows_of(data, accumulate) * 2,
        None if value else clip.get("gradient_clip_val"),
        max_value=clip.get("gradient_clip_val") if value else None,
    )
    return differences(module, truth, accumulate, batches)


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1", "exposed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize(
    ("world_size", "accumulate", "batches"), [(1, 3, 8), (2, 1, 5), (2, 3, 8), (2, 4, 9), (3, 3, 8), (3, 4, 9)]
)
def test_a_step_is_that_of_one_big_batch(
    pool: RankPool, world_size: int, accumulate: int, batches: int, weighted: bool, kind: str
) -> None:
    for clip in ({}, {"gradient_clip_val": CLIP}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}):
        for parameters, norms in pool.run(world_size, against_big_batches, kind, accumulate, batches, weighted, clip):
            assert parameters <= 2e-6
            assert norms <= 1e-5
