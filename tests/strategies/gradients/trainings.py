"""The strategies that all trainings of this folder are tried in, and the batches that they draw."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

import lightning_parstrat
from tests.strategies.gradients.big_batch import Sample, loader, samples
from tests.strategies.parity import make_trainer, zero1, zero3

WEIGHTS = (3.0, 0.0, 11.0, 512.0, 1.0, 40.0, 7.0)
KINDS = ("ddp_tuned", "zero1", "zero2", "zero3", "exposed")
"""Exposed gradients of ``zero1`` are clipped, scaled and stepped by the code that does so under DDP."""


def by_pairs(rows: Iterable[str], kinds: Mapping[str, tuple[str, ...]] | tuple[str, ...] = KINDS) -> list[Any]:
    """Each row with two of the strategies, in rotation; every third one is quick.

    Args:
        rows: Names.
        kinds: The strategies, or those of the rows that are not for all.
    """
    found = []
    for number, row in enumerate(rows):
        allowed = kinds if isinstance(kinds, tuple) else kinds.get(row, KINDS)
        pair = tuple(dict.fromkeys(allowed[(number + step) % len(allowed)] for step in (0, 2)))
        marks = pytest.mark.slow if number % 3 else ()
        found.append(pytest.param(row, pair, id=f"{row}, {' and '.join(pair)}", marks=marks))
    return found


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
