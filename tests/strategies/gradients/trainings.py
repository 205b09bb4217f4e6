"""Trainings of both strategies on the batches of ``big_batch``, and how far they are from its truth."""

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

import lightning_parstrat
from tests.comparing import distance, worst
from tests.slow import slow_unless
from tests.strategies.gradients.big_batch import Regression, Sample, Truth, loader, samples
from tests.strategies.parity import make_trainer, zero1, zero3

WEIGHTS = (3.0, 0.0, 11.0, 512.0, 1.0, 40.0, 7.0)
KINDS = ["ddp_tuned", "zero1", "exposed", "zero2", "zero3"]


def kinds_of(cases: Iterable[Any], exposed: Any = None) -> list[Any]:
    """Each case in all strategies and by sharded accumulation, and one (by default the first) with exposed gradients.

    Exposed gradients are clipped, scaled and stepped by the code that does so under DDP. By sharded accumulation and
    with sharded parameters, that one is quick and the others are slow.
    """
    cases = list(cases)
    one = cases[0] if exposed is None else exposed
    of_both = [(case, kind) for case in cases for kind in ("ddp_tuned", "zero1")]
    kinds = ("zero2", "zero3")
    sharded = slow_unless(lambda case, _: case == one, [(case, kind) for case in cases for kind in kinds])
    return [*of_both, *sharded, (one, "exposed")]


def strategy(kind: str, **arguments: Any) -> Any:
    if kind == "ddp_tuned":
        return lightning_parstrat.TunedDDPStrategy(**arguments)
    if kind == "zero3":
        return zero3(**{"partial_window": "exact", **arguments})
    chosen = {"expose_gradients": kind == "exposed", "shard_gradients": kind == "zero2", "partial_window": "exact"}
    return zero1(**{**chosen, **arguments})


def ranks_batches(batches: int, weights: tuple[float, ...] = (1.0,)) -> list[list[Sample]]:
    return [
        samples(batches, seed=rank, weights=weights[rank:] + weights[:rank]) for rank in range(dist.get_world_size())
    ]


def fit(module: Any, chosen: Any, batches: int, **arguments: Any) -> Trainer:
    """Trains on this rank's batches, which have weights where the module wants them."""
    weights = WEIGHTS if getattr(module, "weighted", False) else (1.0,)
    trainer = make_trainer(chosen, use_distributed_sampler=False, **arguments)
    trainer.fit(module, loader(ranks_batches(batches, weights)[dist.get_rank()]))
    return trainer


def differences(module: Regression, truth: Truth, accumulate: int, batches: int) -> tuple[float, float]:
    """Of parameters and of norms, after the batches that end a window."""
    parameters, norms = _steps(module, accumulate, batches)
    clips = module.trainer.gradient_clip_val is not None and module.trainer.gradient_clip_algorithm != "value"
    # Who clips by norm has to know it. Where nobody asks, it may be unknown; the truth has none without any weight.
    pairs = [(a, b) for a, b in zip(norms, truth.norms, strict=True) if not math.isnan(b)]
    errors = [abs(a - b) / b for a, b in pairs if clips or not math.isnan(a)]
    return distance(parameters, truth.parameters), worst(errors) if clips else worst(0.0, errors)


def _steps(module: Regression, accumulate: int, batches: int) -> tuple[list[Tensor], list[float]]:
    ends = [i for i in range(len(module.seen)) if (i % batches + 1) % accumulate == 0 or i % batches == batches - 1]
    return [module.seen[i] for i in ends], [module.norms[i] for i in ends]
