"""How exact a gradient is that micro-batches give under "bf16-true", beside the mean in fp64.

    OMP_NUM_THREADS=1 python -m benchmarks.sums_in_16_bits --output benchmarks/results/sums_in_16_bits.json

Two CPU ranks, one parameter. Each micro-batch of each rank has a random gradient that bf16 holds exactly.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.machine import write_result
from benchmarks.quiet import QUIET
from lightning_parstrat import ZeRO1Strategy, ZeRO3Strategy

ELEMENTS, RANKS = 20_000, 2
STRATEGIES: dict[str, Any] = {
    "zero3_custom": ZeRO3Strategy,
    "zero3_custom, shard_gradients=False": lambda: ZeRO3Strategy(shard_gradients=False),
    "zero1_custom": lambda: ZeRO1Strategy(expose_gradients=True),
    "zero2_custom": lambda: ZeRO1Strategy(shard_gradients=True),
}


class Given(LightningModule):
    """Whose gradient in a micro-batch is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS // 100, 100))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch[0].to(self.weight.dtype).view_as(self.weight)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def error(strategy: str, micro_batches: int) -> float:
    """The relative L2 distance of a step from that of the mean in fp64."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(micro_batches * RANKS, ELEMENTS, generator=generator).bfloat16().float()
    trainer = Trainer(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        devices=RANKS,
        precision="bf16-true",
        max_steps=1,
        accumulate_grad_batches=micro_batches,
        **QUIET,
    )
    module = Given()
    trainer.fit(module, DataLoader(samples, batch_size=1))
    weight: Any = module.weight.detach()
    found = (weight.full_tensor() if isinstance(weight, DTensor) else weight).double().flatten()
    exact = -samples.double().mean(0)
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8, 64])
    arguments = parser.parse_args()
    errors = {name: {n: error(name, n) for n in arguments.micro_batches} for name in STRATEGIES}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(errors, indent=1))
        write_result({"errors": errors}, arguments.output)


if __name__ == "__main__":
    main()
