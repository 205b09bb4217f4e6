"""In a steady step the host waits for the device no more than a plain Trainer does, and allocates nothing."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.trainings import Layers, check_waits, waits_of
from tests.pool import RankPool
from tests.strategies.late import LateZeRO1
from tests.strategies.parity import by_flag, zero3

TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"gradient_clip_val": 1.0},
    "accumulation": {"accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    "bf16-true": {"precision": "bf16-true", "gradient_clip_val": 1.0},
    # torch's scaler asks the device whether to step.
    "16-mixed": {"fp16": True, "gradient_clip_val": 1.0},
}
WEIGHTS: dict[str, Callable[[torch.device], Any]] = {
    "number": lambda device: 3,
    "on the device": lambda device: torch.full((), 3.0, device=device),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "by flag": by_flag,
    # As with several ranks, where nothing is skipped.
    "path of several ranks": lambda: by_flag(LateZeRO1),
    "zero3": zero3,
}


def count(training: dict[str, Any], strategy: str | None, weight: str | None, folder: str) -> Any:
    path = Path(folder) / f"{strategy}.json"
    make_module = lambda: Layers(weight=None if weight is None else WEIGHTS[weight])  # noqa: E731
    return waits_of(None if strategy is None else STRATEGIES[strategy](), path, make_module, **training)


# The host waits for each weight's copy, which was queued before backward: it has to know whether a step has any weight.
FOR_WEIGHTS = {"on the device": Counter({"cudaEventSynchronize": 6})}


def compare(ranks: RankPool, training: dict[str, Any], strategy: str, weight: str | None, folder: Path) -> None:
    ((expected, _),) = ranks.run(1, count, training, None, weight, str(folder))
    ((found, launched),) = ranks.run(1, count, training, strategy, weight, str(folder))
    check_waits(ranks.device, expected + FOR_WEIGHTS.get(weight or "", Counter()), found, launched)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, one) for name in TRAININGS for one in STRATEGIES if one != "zero3" or name in ("clipping", "accumulation")],
)
def test_the_host_waits_no_more_than_a_plain_trainers(
    ranks: RankPool, tmp_path: Path, name: str, strategy: str
) -> None:
    compare(ranks, TRAININGS[name], strategy, None, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_of_losses_are_waited_for_where_the_host_must_know_them(
    ranks: RankPool, tmp_path: Path, weight: str, precision: str
) -> None:
    training = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": precision}
    compare(ranks, training, "by flag", weight, tmp_path)


class Looks(Layers):
    """Has the host wait, in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss


def count_a_wait(folder: str) -> Counter[str]:
    found, _ = waits_of(None, Path(folder) / "looks.json", Looks)
    return found


@pytest.mark.slow
def test_a_wait_is_found(ranks: RankPool, cuda: str, tmp_path: Path) -> None:
    (found,) = ranks.run(1, count_a_wait, str(tmp_path))
    assert sum(found.values()) >= 6, found
