"""What the jobs train, and where they are killed from inside."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parstrat import PipelineStrategy, TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from lightning_parstrat.distributed.comm import liveness
from tests.faults.jobs import TIMEOUT
from tests.faults.points import POINTS, KillsAt, kill
from tests.strategies.data.rows import Numbered
from tests.strategies.parity import make_trainer, whole

STEPS = 12
SAVES_EVERY = 2
EPOCHS = 2
BATCH = 4

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
STRATEGIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "zero1_custom": (ZeRO1Strategy, SMALL_BUCKETS),
    "zero2_custom": (ZeRO1Strategy, {"shard_gradients": True, **SMALL_BUCKETS}),
    # Otherwise DDP makes its buckets after the first step, and sums that one in another order.
    "ddp_tuned": (TunedDDPStrategy, {"find_unused_parameters": True, **SMALL_BUCKETS}),
    "zero3_custom": (ZeRO3Strategy, {"auto_wrap_policy": {nn.Linear}}),
    "pipeline_custom": (PipelineStrategy, {"auto_wrap_policy": {nn.Linear, nn.Dropout}}),
    "groups": (ZeRO1Strategy, {"shard_group": 1, "outer_every": 3, **SMALL_BUCKETS}),
    "two pipelines": (PipelineStrategy, {"auto_wrap_policy": {nn.Linear, nn.Dropout}, "data_parallel_size": 2}),
}
MICRO_BATCHES = {name: 2 if name == "zero2_custom" else 1 for name in STRATEGIES}
"""Of a step."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return self.layers(batch[:, 1:]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def say(line: str) -> None:
    """Prints a line in one piece: this process may be killed at any moment, and two threads print."""
    os.write(1, f"{line}\n".encode())


def shuffled(batches: int, shares: int) -> DataLoader[Tensor]:
    """An ordinary loader: the last sample of an epoch is padding, as the ranks do not divide the samples.

    Args:
        batches: In an epoch.
        shares: Among so many ranks samples are divided.
    """
    of_all = BATCH * dist.get_world_size()
    return DataLoader(Numbered(batches * of_all - 1), of_all // shares, shuffle=True)


def train(folder: str, arguments: dict[str, Any], killed_at: tuple[str, int, int] | None = None, *more: Any) -> None:
    """Trains from the last checkpoint, if there is one, to the end, and leaves what came of it in ``result.pt``.

    Args:
        folder: For the checkpoints.
        arguments: The strategy's, and under ``"strategy"`` its name.
        killed_at: A point of :data:`POINTS`, which rank passes it, and at which time of passing it is killed; 0 for
            never.
        more: Further callbacks.
    """
    # What is drawn in a resumed training comes from the checkpoint, whatever this process was seeded with.
    resumes = any(Path(folder).glob("last*.ckpt"))
    torch.manual_seed(dist.get_rank() + 100 * resumes)
    liveness.GRACE = timedelta(seconds=3)
    saving = ModelCheckpoint(
        folder, "{step}", save_last=True, every_n_train_steps=SAVES_EVERY, enable_version_counter=False
    )
    name = arguments.get("strategy", "zero1_custom")
    kind, of_kind = STRATEGIES[name]
    own = {key: value for key, value in arguments.items() if key != "strategy"}
    trainer = make_trainer(
        kind(timeout=TIMEOUT, **{**of_kind, **own}),
        callbacks=[saving, SaysWhatItTrains(), *more],
        enable_checkpointing=True,
        max_epochs=EPOCHS,
        accumulate_grad_batches=MICRO_BATCHES[name],
        default_root_dir=folder,
    )
    if killed_at is not None and dist.get_rank() == killed_at[1]:
        POINTS[killed_at[0]](KillsAt(killed_at[2]))
    module = Net()
    shares = trainer.distributed_sampler_kwargs["num_replicas"]
    data = shuffled(STEPS // EPOCHS * MICRO_BATCHES[name], shares)
    trainer.fit(module, data, ckpt_path="last", weights_only=True)
    trained = [whole(parameter).detach() for parameter in module.parameters()]
    if dist.get_rank() == 0:
        result = Path(folder) / f"result-of-{os.getpid()}"
        torch.save(trained, result)
        # Two jobs may train in one folder.
        result.rename(result.with_name("result.pt"))


class SaysWhatItTrains(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say(f"begins after step {trainer.global_step}.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        samples = " ".join(str(int(number)) for number in batch[:, 0])
        say(f"trains {trainer.fit_loop.epoch_loop.total_batch_idx} on {samples}")


class EndsAfter(Callback):
    """Has all ranks killed after a step, before it is saved, by a hook that may not look at gradients.

    Others would have them exposed, and summed in another order.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            dist.barrier()
            kill()


class RunsOutOfMemory(Callback):
    """Has one rank run out of memory at one place of a step.

    Args:
        rank: Which rank.
        place: One of :data:`PLACES_THAT_ALLOCATE`.
        step: In which step.
    """

    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            PLACES_THAT_ALLOCATE[self.place](trainer, module)


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


def _fails(owner: Any, name: str) -> None:
    """Has a method of an object fail from now on."""
    setattr(owner, name, _out_of_memory)


PLACES_THAT_ALLOCATE: dict[str, Callable[[Trainer, Any], Any]] = {
    "training_step": lambda trainer, module: _fails(module.layers[0], "forward"),
    # Of the first layer: the last one's gradients have left.
    "backward": lambda trainer, module: module.layers[0].weight.register_hook(_out_of_memory),
    "clipping": lambda trainer, module: _fails(trainer.precision_plugin, "clip_gradients"),
    "optimizer's step": lambda trainer, module: module.optimizers().optimizer.register_step_pre_hook(_out_of_memory),
    "parameters' arrival": lambda trainer, module: _fails(trainer.strategy._engine.buckets[0], "finish_gather"),
}
"""Where a step allocates: what has a rank run out of memory there, once."""


class SignalledWhileSaving(Callback):
    """Sends this process a signal when it writes a checkpoint for the n-th time."""

    def __init__(self, signum: signal.Signals, rank: int, time_of_writing: int) -> None:
        self.signum, self.rank, self.left = signum, rank, time_of_writing

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)
