"""What zero1_custom is measured beside: the same module and optimizer under other strategies."""

import ast
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_parstrat import ZeRO1Strategy

SINGLE_PROCESS = "single_process"
FSDP2_BY_HAND = "fsdp2_by_hand"
WHOLE_BATCH = ("pipeline_custom", "single_process(whole batch)")
"""What trains on the batch of all ranks."""
WITHIN_STEP = "zero1_custom(overlap_param_gather=False)"
FORMATS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1_custom(full)": {},
    "zero1_custom(sharded)": {"state_dict_type": "sharded"},
    "zero1_custom(async)": {"state_dict_type": "sharded", "async_save": True},
}
"""Ways to save, by what a strategy is given."""
PEERS = (
    "ddp",
    "ddp+zero_redundancy",
    "fsdp2",
    "deepspeed_stage_1",
    "ddp_tuned",
    "zero1_custom",
    "zero2_custom",
    SINGLE_PROCESS,
)


class GPT(LightningModule):
    """A decoder, real or emulated, under AdamW."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.decoder(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class ZeroRedundancyGPT(GPT):
    """Its optimizer is torch's own that shards state over DDP's ranks.

    Clipping sees the whole mean gradients, which DDP leaves on every rank.
    """

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(
            self.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-4, parameters_as_bucket_view=True
        )


class FullyShardedGPT(GPT):
    """Shards its decoder by FSDP2, but keeps parameters whole from forward to backward, which is ZeRO-2's traffic."""

    def configure_model(self) -> None:
        if isinstance(self.decoder, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.decoder.units(), self.decoder):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Lightning leaves it to the module to send nothing before the last micro-batch.
        last = not self.trainer.fit_loop._should_accumulate()
        self.decoder.set_requires_gradient_sync(last)
        self.decoder.set_reshard_after_backward(last)
        return super().training_step(batch, batch_idx)


class ShardedByHandGPT(GPT):
    """Shards its decoder by FSDP2 as torch's documentation shows it, by the units that zero3_custom finds: ZeRO-3."""

    def configure_model(self) -> None:
        if isinstance(self.decoder, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.decoder.blocks.layers, self.decoder):
            fully_shard(module, mesh=mesh)


def reason_to_leave_out(name: str) -> str | None:
    """Why a strategy cannot run here, or None."""
    return "Lightning's strategy for it runs on CUDA alone" if name == "deepspeed_stage_1" else None


def make_module(name: str, decoder: nn.Module) -> GPT:
    """The module that trains ``decoder`` under that strategy."""
    modules = {"ddp+zero_redundancy": ZeroRedundancyGPT, "fsdp2": FullyShardedGPT, FSDP2_BY_HAND: ShardedByHandGPT}
    return modules.get(name, GPT)(decoder)


def make_strategy(name: str, ranks: int) -> Strategy | str:
    """What to hand to the Trainer; ``zero1_custom(comm_dtype="bf16")`` has arguments. Lightning knows other names."""
    if name == "ddp+zero_redundancy":
        return "ddp"
    if name in ("fsdp2", FSDP2_BY_HAND):
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if name in (SINGLE_PROCESS, WHOLE_BATCH[1]):
        return SingleDeviceStrategy(device=torch.device("cpu"))
    if name in FORMATS and name != "ddp":
        return ZeRO1Strategy(**FORMATS[name])
    if name.startswith("zero1_custom("):
        given = cast(ast.Call, ast.parse(name, mode="eval").body).keywords
        return ZeRO1Strategy(**{str(one.arg): ast.literal_eval(one.value) for one in given})
    return name
