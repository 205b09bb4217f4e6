"""What the jobs train, and where they are killed from inside."""

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_parstrat
from lightning_parstrat.distributed import durable_files
from lightning_parstrat.distributed.comm import liveness as liveness
from tests.faults.jobs import TIMEOUT
from tests.strategies.parity import make_trainer

STEPS = 12
SAVES_EVERY = 2


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Batches:
    """Knows where it is, so that nothing is trained twice or left out."""

    def __init__(self) -> None:
        self.position = self.begin_at = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.begin_at = self.begin_at, 0
        while self.position < STEPS:
            self.position += 1
            yield torch.randn(4, 8) + self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = state["position"]


def train(folder: str, arguments: dict[str, Any], killed_at: tuple[str, int, int] | None = None, *more: Any) -> None:
    """Trains from the last checkpoint, if there is one, to the end, and leaves what came of it in ``result.pt``.

    Args:
        folder: For the checkpoints.
        arguments: The strategy's.
        killed_at: A point of :data:`POINTS`, which rank passes it, and at which time of passing it is killed; 0 for
            never.
        more: Further callbacks.
    """
    torch.manual_seed(dist.get_rank())
    liveness.GRACE = timedelta(seconds=3)
    saving = ModelCheckpoint(
        folder, "{step}", save_last=True, every_n_train_steps=SAVES_EVERY, enable_version_counter=False
    )
    trainer = make_trainer(
        lightning_parstrat.ZeRO1Strategy(timeout=TIMEOUT, bucket_cap_mb=0.001, **arguments),
        callbacks=[saving, SaysWhereItBegins(), *more],
        enable_checkpointing=True,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    if killed_at is not None and dist.get_rank() == killed_at[1]:
        POINTS[killed_at[0]](_KillsAt(killed_at[2]))
    module = Net()
    trainer.fit(module, Batches(), ckpt_path="last", weights_only=True)
    if dist.get_rank() == 0:
        torch.save([parameter.detach() for parameter in module.parameters()], Path(folder) / "result.pt")


class _KillsAt:
    """Kills this process when it is called for the n-th time."""

    def __init__(self, time_of_passing: int) -> None:
        self._left = time_of_passing

    @property
    def is_now(self) -> bool:
        self._left -= 1
        return self._left == 0

    def __call__(self) -> None:
        if self.is_now:
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # Nothing more is done until the signal is here.
    signal.pause()


def _mid_file(kills: _KillsAt) -> None:
    from lightning_parstrat.distributed.checkpoint import writing

    for module, name in ((torch, "save"), (writing, "write_zipped")):
        setattr(module, name, _half(getattr(module, name), kills))


def _half(write: Callable[..., Any], kills: _KillsAt) -> Callable[..., Any]:
    def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not kills.is_now:
            write(value, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        write(value, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        kill()

    return half


def _before_fsync(kills: _KillsAt) -> None:
    _before(os, "fsync", kills)


def _before_rename(kills: _KillsAt) -> None:
    for module in _modules_that_name("put_in_place"):
        _before(module, "put_in_place", kills)


def _after_rename(kills: _KillsAt) -> None:
    for module in _modules_that_name("put_in_place"):
        _after(module, "put_in_place", kills)


def _between_renames(kills: _KillsAt) -> None:
    """On a file system that cannot exchange two names."""
    durable_files._exchange = lambda one, other: False
    _after(os, "rename", kills)


def _between_ranks(kills: _KillsAt) -> None:
    """When the others have sent or written their parts."""

    from lightning_parstrat.distributed.checkpoint import writing
    from lightning_parstrat.distributed.zero1 import state_messages

    for module, name in ((state_messages, "_send"), (writing, "write_shard")):
        _before(module, name, lambda: (time.sleep(0.3), kills()))


POINTS: dict[str, Callable[[_KillsAt], None]] = {
    "mid-file": _mid_file,
    "before fsync": _before_fsync,
    "before rename": _before_rename,
    "after rename": _after_rename,
    "between renames": _between_renames,
    "between ranks": _between_ranks,
}


def _modules_that_name(name: str) -> list[Any]:
    from lightning_parstrat.distributed.checkpoint import writing as sharded_checkpoint

    return [module for module in (durable_files, sharded_checkpoint) if hasattr(module, name)]


def _before(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act()
        return result

    setattr(owner, name, wrapped)


class SaysWhereItBegins(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        print(f"begins after step {trainer.global_step}.")


class RaisesOnOneRank(Callback):
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            raise ValueError("a fault of this rank alone")


class SignalledWhileSaving(Callback):
    """Sends this process a signal when it writes a checkpoint for the n-th time."""

    def __init__(self, signum: signal.Signals, rank: int, time_of_writing: int) -> None:
        self.signum, self.rank, self.left = signum, rank, time_of_writing

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)
