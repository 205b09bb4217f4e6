"""The same module, optimizer and data under each strategy, through Lightning's Trainer."""

import gc
import logging
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from benchmarks.gpu.clocks import device_clock
from benchmarks.gpu.model import SIZES, Batches
from benchmarks.gpu.namespace import lightning, parstrat, strategies
from benchmarks.gpu.rows import IN_16_BITS, OURS, PLAIN, Row
from benchmarks.quiet import QUIET

# The default on a GPU. Fused would take less memory, but Lightning refuses to clip for it in mixed precision.
_ADAMW = {"lr": 3e-4, "foreach": True}
_CLIP = 1.0


class Task(NamedTuple):
    """What is trained in a row.

    Attributes:
        row: Which one.
        device: On what.
    """

    row: Row
    device: torch.device


class Trained(lightning.LightningModule):
    """A decoder under AdamW; it is made on the device, where drawing billions of weights takes no time."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        torch.manual_seed(0)
        with task.device:
            self.decoder = SIZES[task.row.model].make_decoder()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.decoder(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **_ADAMW)


class TrainedByZeroRedundancy(Trained):
    """Its optimizer is torch's own that shards state over DDP's ranks; clipping sees whole gradients, on every rank."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(
            self.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **_ADAMW
        )


class TrainedByFSDP2(Trained):
    """Shards layer by layer, and keeps parameters whole from forward to backward, which is ZeRO-2's traffic.

    In mixed precision FSDP2 casts parameters itself, instead of autocast: so its users train.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        mixed = task.row.precision == "bf16-mixed"
        self._policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        self._is_sharded = False

    def configure_model(self) -> None:
        if not self._is_sharded:
            self._is_sharded = True
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.decoder.blocks.layers, self.decoder):
                fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=self._policy)


_MODULES = {"fsdp2": TrainedByFSDP2, "zero_redundancy": TrainedByZeroRedundancy}


def make_strategy(name: str, task: Task) -> Any:
    """What trains under that name, if need be one of Lightning's."""
    if name == PLAIN:
        return strategies.SingleDeviceStrategy(device=task.device)
    if name == OURS:
        return parstrat.ZeRO1Strategy()
    if name == IN_16_BITS:
        return parstrat.ZeRO1Strategy(master_weights=False)
    if name == "ddp_tuned":
        return parstrat.TunedDDPStrategy()
    if name == "fsdp2":
        return strategies.ModelParallelStrategy(data_parallel_size=task.row.ranks, tensor_parallel_size=1)
    # torch's optimizer shards over DDP's ranks.
    return strategies.DDPStrategy() if name in ("ddp", "zero_redundancy") else name


def fit(name: str, task: Task, steps: int, callbacks: Sequence[Any], short: bool = False) -> None:
    """Trains for so many steps under that strategy, in this process, and leaves nothing of it behind.

    Args:
        name: Of the strategy.
        task: What is trained.
        steps: How many.
        callbacks: Look on.
        short: Whether batches are next to nothing, so that a device never keeps its host waiting.
    """
    mixed_by_itself = name == "fsdp2" and task.row.precision == "bf16-mixed"
    trainer = lightning.Trainer(
        accelerator=task.device.type,
        devices=1,
        num_nodes=1 if name == PLAIN else task.row.ranks,
        strategy=make_strategy(name, task),
        precision="32-true" if mixed_by_itself else task.row.precision,
        max_steps=steps,
        gradient_clip_val=_CLIP,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **QUIET,
    )
    data = Batches(SIZES[task.row.model], steps, task.device, short)
    try:
        trainer.fit(_MODULES.get(name, Trained)(task), DataLoader(data, batch_size=None))
    finally:
        del trainer, data
        clean_up(task.device)


def clean_up(device: torch.device) -> None:
    """Gives back what is garbage."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def computing_seconds(task: Task, steps: int) -> float:
    """What forward and backward alone take the device, a step, without Lightning and without an optimizer."""
    mixed = task.row.precision == "bf16-mixed"
    size = SIZES[task.row.model]
    module = Trained(task).decoder
    if not mixed:
        module = module.to(torch.bfloat16)
    data = Batches(size, steps, task.device, short=False)
    seconds = []
    for index in range(2 * steps):
        began = device_clock(task.device)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=mixed):
            loss = module(data[index])
        loss.backward()
        seconds.append(device_clock(task.device) - began)
        module.zero_grad()
    del module, data, loss
    clean_up(task.device)
    return sorted(seconds[steps:])[steps // 2]


def silence() -> None:
    """Keeps Lightning's lines about each of many Trainers out of the result."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
