"""What saving and loading hold in host memory."""

import ctypes
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parstrat
from tests.pool import RankPool
from tests.strategies.checkpoint.trainings import FORMATS
from tests.strategies.parity import make_trainer

pytestmark = pytest.mark.slow

WIDTH, DEPTH = 1024, 12
PARAMETER_BYTES = 4 * DEPTH * WIDTH * WIDTH
TENSOR_BYTES = 4 * WIDTH * WIDTH
MESSAGES = 16 * 2**20
"""Of an optimizer's state on their way to rank 0, which holds as many; this model's are no larger."""
M_MMAP_THRESHOLD = -3
"""Of `mallopt`."""
SLACK = 4 * 2**20
"""For what is allocated on the way and has nothing to do with the size of the model."""


class Large(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH, bias=False)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def batches() -> Any:
    return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2)


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {field}")


def settle() -> None:
    """Memory that is free goes back to the system, and the peak begins anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def free_at_once() -> None:
    """From here on what is freed goes back to the system, in a process that has freed nothing large before.

    By default the threshold grows with what is freed: buffers then come from heaps, and stay there when they are freed.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path
        self.growth: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        # The first save makes what later ones find there.
        if batch_idx in (2, 3):
            settle()
            before = status("VmRSS")
            trainer.save_checkpoint(self.path)
            self.growth.append(status("VmHWM") - before)


# Messages are as large as buckets.
BY_BUCKETS = functools.partial(lightning_parstrat.ZeRO1Strategy, bucket_cap_mb=8.0)


def growth_of_saving(path: str, arguments: dict[str, Any], make: Callable[..., Any] = BY_BUCKETS) -> int:
    free_at_once()
    saves = Saves(path)
    trainer = make_trainer(make(**arguments), callbacks=[saves])
    trainer.fit(Large(), batches())
    return saves.growth[-1]


FULL, SHARDED, ASYNC = FORMATS.values()
COPIED = 3 / 2 * PARAMETER_BYTES
"""Half of the parameters and of the state."""
PEAKS: dict[str, tuple[Callable[..., Any], dict[str, Any], float, float]] = {
    # The whole state of the optimizer, and messages that are on their way; others what they send.
    "full": (BY_BUCKETS, FULL, 2 * PARAMETER_BYTES + MESSAGES, MESSAGES),
    # The elements of one tensor, or of a shard, on their way to the file.
    "sharded": (BY_BUCKETS, SHARDED, 2 * TENSOR_BYTES, 2 * TENSOR_BYTES),
    "async": (BY_BUCKETS, ASYNC, COPIED + 2 * TENSOR_BYTES, COPIED + 2 * TENSOR_BYTES),
    "rows": (lightning_parstrat.ZeRO3Strategy, SHARDED, TENSOR_BYTES, TENSOR_BYTES),
    "rows, async": (lightning_parstrat.ZeRO3Strategy, ASYNC, COPIED + TENSOR_BYTES, COPIED + TENSOR_BYTES),
}
"""Of a save: the strategy and its arguments, and the peak of rank 0 and of others."""


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_saving(own_pool: RankPool, tmp_path: Path, name: str) -> None:
    make, arguments, of_rank_0, of_others = PEAKS[name]
    first, second = own_pool.run(2, growth_of_saving, str(tmp_path / "a.ckpt"), arguments, make)
    assert first < of_rank_0 + SLACK and second < of_others + SLACK


class LoadsMapped(lightning_parstrat.ZeRO1Strategy):
    """Notes what loading has left in memory that no file backs."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        settle()
        before = status("RssAnon")
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self.after_loading = status("RssAnon") - before
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        settle()
        before = status("RssAnon")
        super().load_optimizer_state_dict(checkpoint)
        self.after_optimizers = status("RssAnon") - before


def growth_of_loading(path: str) -> tuple[int, int]:
    free_at_once()
    strategy = LoadsMapped()
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(Large(), batches(), ckpt_path=path, weights_only=True)
    dist.barrier()
    return strategy.after_loading, strategy.after_optimizers


def test_loading_copies_a_ranks_own_part_alone(own_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    own_pool.run(2, growth_of_saving, path, {})
    for after_loading, after_optimizers in own_pool.run(2, growth_of_loading, path):
        assert after_loading < SLACK
        assert after_optimizers < PARAMETER_BYTES + SLACK
