"""Two networks with an optimizer each, stepped by hand; and the same in plain torch."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.strategies.gradients.big_batch import Sample, flat, network, sgd


def second_network() -> nn.Module:
    """Of another size, with larger gradients: neither norm may be taken for the other, or for that of both."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def losses_of(first: nn.Module, second: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    mean = nn.functional.mse_loss
    return mean(first(inputs), targets), 5 * mean(second(inputs), targets)


class TwoOptimizers(LightningModule):
    """``clip`` is called with the module and both optimizers after backward; ``poisoned`` batches make the second NaN.

    A batch is poisoned on the ranks with ``poisons``.
    """

    def __init__(
        self,
        clip: Callable[[Any, list[Any]], None] | None = None,
        poisoned: Sequence[int] = (),
        poisons: bool = False,
        optimizer: Callable[[Any], Optimizer] = sgd,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = network(), second_network()
        self.clip, self.poisoned, self.poisons, self.make_optimizer = clip, poisoned, poisons, optimizer
        self.seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Sample, batch_idx: int) -> None:
        optimizers = self.optimizers()
        losses = losses_of(self.first, self.second, batch.inputs, batch.targets)
        factor = math.nan if self.poisons and batch_idx in self.poisoned else 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(losses[0] + losses[1] * factor)
        if self.clip is not None:
            self.clip(self, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        self.seen.append((flat(self.first), flat(self.second)))

    def configure_optimizers(self) -> list[Optimizer]:
        return [self.make_optimizer(self.first.parameters()), self.make_optimizer(self.second.parameters())]


def train_two(
    batches: Sequence[Sequence[Sample]],
    clip: Callable[[list[Tensor], list[Tensor]], None] | None = None,
    skipped_by_second: Sequence[int] = (),
    optimizer: Callable[[Any], Optimizer] = sgd,
) -> list[tuple[Tensor, Tensor]]:
    """Parameters after each step on the mean over ranks, whose micro-batches ``batches`` holds by step."""
    first, second = copy.deepcopy(network()).double(), copy.deepcopy(second_network()).double()
    optimizers = [optimizer(first.parameters()), optimizer(second.parameters())]
    seen = []
    for index, ranks in enumerate(batches):
        for stepper in optimizers:
            stepper.zero_grad()
        for sample in ranks:
            one, other = losses_of(first, second, sample.inputs.double(), sample.targets.double())
            ((one + other) / len(ranks)).backward()
        if clip is not None:
            clip(list(first.parameters()), list(second.parameters()))
        optimizers[0].step()
        if index not in skipped_by_second:
            optimizers[1].step()
        seen.append((flat(first), flat(second)))
    return seen
