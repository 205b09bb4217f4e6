"""In a steady step the host waits for the device no more than a plain Trainer does, and allocates nothing."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.trainings import Layers, check_waits, waits_of
from tests.pool import RankPool
from tests.strategies.late import LateZeRO1
from tests.strategies.parity import by_flag, zero3

TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"gradient_clip_val": 1.0},
    "accumulation": {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    "bf16-true": {"precision": "bf16-true", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    # torch's scaler asks the device whether to step.
    "16-mixed": {"fp16": True, "gradient_clip_val": 1.0},
}
WEIGHTS: dict[str, Callable[[torch.device], Any]] = {
    "number": lambda device: 3,
    "on the device": lambda device: torch.full((), 3.0, device=device),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "by flag": lambda: by_flag(bucket_cap_mb=0.5),
    # As with several ranks, where nothing is skipped.
    "path of several ranks": lambda: by_flag(LateZeRO1),
    "zero3": zero3,
}
# Training, strategy, weights of losses, and how many ranks.
ROWS: list[tuple[str, str, str | None, int]] = [
    *((name, one, None, 1) for name in TRAININGS for one in ("by flag", "path of several ranks")),
    *((name, one, None, 2) for name in ("clipping", "accumulation") for one in ("by flag", "zero3")),
    *((name, "zero3", None, 1) for name in ("clipping", "accumulation")),
    *((name, "by flag", weight, 1) for name in ("accumulation", "bf16-true") for weight in WEIGHTS),
]


def count(training: str, strategy: str, weight: str | None, folder: str) -> tuple[Counter[str], Counter[str], int]:
    path = Path(folder) / f"{dist.get_rank()}.json"
    make_module = lambda: Layers(256, 8, weight=None if weight is None else WEIGHTS[weight])  # noqa: E731
    expected, _ = waits_of(None, path, make_module, **TRAININGS[training])
    return expected, *waits_of(STRATEGIES[strategy](), path, make_module, **TRAININGS[training])


# The host waits for each weight's copy, which was queued before backward: it has to know whether a step has any weight.
FOR_WEIGHTS = {"on the device": Counter({"cudaEventSynchronize": 6})}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "weight", "world_size"), ROWS)
def test_the_host_waits_no_more_than_a_plain_trainers(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, strategy: str, weight: str | None, world_size: int
) -> None:
    pool = request.getfixturevalue("ranks" if world_size == 1 else "two")
    for expected, found, launched in pool.run(world_size, count, name, strategy, weight, str(tmp_path)):
        if world_size > 1:
            # torch's: a kernel that copies many tensors, as FSDP2 does for a gather, reads their addresses from there.
            del found["cudaHostAlloc"]
        check_waits(pool.device, expected + FOR_WEIGHTS.get(weight or "", Counter()), found, launched)


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
