"""``zero3_custom``: FSDP2 on one rank and on two, where what travels is NaN until the device has slept for a while."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.core.full_sharding import FullySharded, GatheredUnit, ItemSizes
from tests.comparing import distance
from tests.gpu.test_features import TOLERANCE, train_compiled
from tests.gpu.test_memory import WITHIN, let_libraries_allocate
from tests.gpu.trainings import (
    Layers,
    MostHeld,
    allocated,
    check_waits,
    clip_with_fused,
    fit,
    fused,
    parameters_on_host,
    waits_of,
)
from tests.pool import RankPool
from tests.strategies.late import late_zero3
from tests.strategies.parity import ddp, largest_difference, zero3


def compare_modules(name: str) -> float:
    return largest_difference(train_compiled(name, zero3()), train_compiled(name, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints", "compiled blocks"])
def test_blocks_of_all_kinds_train_as_on_a_single_device(ranks: RankPool, name: str) -> None:
    assert ranks.run(1, compare_modules, name)[0] <= TOLERANCE


CHOICES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("32-true", {}, 1e-4),
    ("bf16-mixed", {"gather_dtype": "bf16"}, 2e-2),
    ("bf16-mixed", {"gather_dtype": "bf16", "reduce_dtype": "bf16"}, 4e-2),
)


def compare_layers(precision: str, policy: dict[str, Any]) -> tuple[float, float]:
    trained = []
    for strategy in (ddp(), late_zero3(**policy)):
        torch.manual_seed(0)
        module = Layers(256, 8, 16, fused)
        fit(module, strategy, precision=precision, gradient_clip_val=clip_with_fused(precision))
        trained.append(parameters_on_host(module))
    return distance(trained[1], trained[0]), max(float(one.abs().max()) for one in trained[0])


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "policy", "tolerance"), CHOICES)
def test_a_larger_training_is_ddps(two: RankPool, precision: str, policy: dict[str, Any], tolerance: float) -> None:
    for difference, largest in two.run(2, compare_layers, precision, policy):
        assert difference <= tolerance * largest


def count_waits(folder: str, accumulate: int) -> tuple[Counter[str], Counter[str], int]:
    path = Path(folder) / f"{dist.get_rank()}.json"
    arguments: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": accumulate}
    expected, _ = waits_of(None, path, lambda: Layers(256, 8), **arguments)
    found, launched = waits_of(zero3(), path, lambda: Layers(256, 8), **arguments)
    return expected, found, launched


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_host_of_one_rank_waits_no_more_than_a_plain_trainers(
    ranks: RankPool, tmp_path: Path, accumulate: int
) -> None:
    for counted in ranks.run(1, count_waits, str(tmp_path), accumulate):
        check_waits(ranks.device, *counted)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_hosts_of_two_wait_no_more_than_a_plain_trainers(two: RankPool, tmp_path: Path, accumulate: int) -> None:
    for counted in two.run(2, count_waits, str(tmp_path), accumulate):
        check_waits(two.device, *counted)


def measure(width: int, number: int, precision: str) -> tuple[int, int, int, int]:
    """What the formula says of a rank between steps and at most, and what it held."""
    let_libraries_allocate()
    measuring = MostHeld(allocated())
    fit(Layers(width, number, make_optimizer=fused), zero3(), callbacks=[measuring], precision=precision)
    units = [GatheredUnit([(width, width), (width,)])] * number
    sharded = FullySharded(GatheredUnit([]), units, dist.get_world_size())
    held = sharded.held_bytes(dist.get_rank(), 4, 8)
    # Without a second copy of all weights under autocast.
    sizes = ItemSizes(gathered=2) if precision == "bf16-mixed" else ItemSizes()
    return held.total, sharded.peak_bytes(held, sizes, accumulates=False), measuring.held, measuring.peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_memory_of_two_ranks_is_that_of_the_formula(two: RankPool, precision: str) -> None:
    shape = (1024, 96) if two.device == "cuda" else (64, 8)
    for held, peak, found, most in two.run(2, measure, *shape, precision):
        assert 0 < held < peak
        if two.device == "cuda":
            assert abs(found - held) <= WITHIN * held, (found, held)
            assert most <= (1 + WITHIN) * peak, (most, peak)
