"""The truth for accumulation and clipping: a loop in plain torch, on one process, over the whole window at once."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.strategies.parity import whole

FEATURES = 6


class Sample(NamedTuple):
    """One micro-batch of one rank, and its weight."""

    inputs: Tensor
    targets: Tensor
    weight: float


def samples(count: int, seed: int = 0, weights: Sequence[float] = (1.0,)) -> list[Sample]:
    """``count`` micro-batches; the weights repeat."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            torch.randn(3, FEATURES, generator=generator),
            torch.randn(3, 2, generator=generator),
            float(weights[index % len(weights)]),
        )
        for index in range(count)
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 5, bias=False), nn.Tanh(), nn.Linear(5, 2))


# Unlike Adam's, its step is as large as the gradient: a wrong scale shows at once.
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
adamw = partial(torch.optim.AdamW, lr=0.02)
fused = partial(torch.optim.AdamW, lr=0.02, fused=True)


class Regression(LightningModule):
    """Draws its rank's micro-batches, and may return their weights.

    It keeps the parameters after every step, and the strategy's norm: NaN for none.
    """

    def __init__(self, optimizer: Callable[[Any], Optimizer] = sgd, weighted: bool = False) -> None:
        super().__init__()
        self.network = network()
        self.optimizer = optimizer
        self.weighted = weighted
        self.steps = 0
        self.norms: list[Tensor] = []
        self.seen: list[Tensor] = []

    def on_train_start(self) -> None:
        self.steps = self.trainer.global_step

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        inputs, targets, weight = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        return {"loss": loss, "loss_weight": weight} if self.weighted else loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step > self.steps:
            self.steps = self.trainer.global_step
            self.seen.append(flat(self))
            norm = getattr(self.trainer.strategy, "grad_norm", None)
            self.norms.append(torch.tensor(math.nan) if norm is None else norm.clone())


# It looks at parameters, not at gradients: "auto" must not expose them on its account.
Regression.on_train_batch_end.__module__ = "lightning.pytorch.core.module"


class Poisoned(Regression):
    """Makes gradients that are not finite in the batches ``at`` (counted over epochs), on one rank.

    Args:
        at: The batches.
        rank: The rank.
        value: What the loss is multiplied by there, NaN or inf.
        only: The one parameter that is to get such a gradient; by default it is most of them.
        **arguments: Of the base class.
    """

    def __init__(
        self, at: tuple[int, ...] = (), rank: int = 1, value: float = math.nan, only: str = "", **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.at, self.rank, self.value, self.only = at, rank, value, only
        self.count = 0

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.count in self.at and dist.get_rank() == self.rank:
            loss = loss + (self.get_parameter(self.only) * self.value).sum() if self.only else loss * self.value
        self.count += 1
        return loss


def flat(module: nn.Module) -> Tensor:
    """All parameters, one after the other. Collective for what is sharded."""
    return torch.cat([whole(parameter.detach()).reshape(-1) for parameter in module.parameters()])


def loader(batches: Sequence[Sample]) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None, shuffle=False)


class Truth(NamedTuple):
    """After each window: all parameters, and the norm before clipping; NaN where nothing had any weight."""

    parameters: list[Tensor]
    norms: list[float]


def train_on_big_batches(
    windows: Sequence[Sequence[Sample]],
    max_norm: float | None = None,
    norm_type: float = 2.0,
    optimizer: Callable[[Any], Optimizer] = sgd,
    max_value: float | None = None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
) -> Truth:
    """Steps once per window on the weighted mean of its micro-batches' losses, clipped by torch's own functions."""
    model = copy.deepcopy(network()).double()
    stepper = optimizer(model.parameters())
    truth = Truth([], [])
    for window in windows:
        stepper.zero_grad()
        total = sum(sample.weight for sample in window)
        if total > 0:
            losses = [
                sample.weight / total * loss_of(model(sample.inputs.double()), sample.targets.double())
                for sample in window
                if sample.weight
            ]
            loss = torch.stack(losses).sum()
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
            if max_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            if max_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), max_value)
            stepper.step(lambda loss=loss: loss)
        truth.norms.append(float(norm) if total > 0 else math.nan)
        truth.parameters.append(flat(model))
    return truth


def windows_of(epoch: Sequence[Sequence[Sample]], windows: Sequence[Sequence[int]]) -> list[list[Sample]]:
    """What steps are made of: the micro-batches of each rank, and the batches of each step."""
    return [[rank[index] for index in window for rank in epoch] for window in windows]


def every(accumulate: int, batches: int) -> list[list[int]]:
    """The batches of each step of an epoch: so many, and a shorter rest at the end."""
    return [list(range(start, min(start + accumulate, batches))) for start in range(0, batches, accumulate)]
