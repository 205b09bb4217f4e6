"""Trainings in which gradients are not finite in chosen batches, and everything that their steps leave behind."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_parstrat.core.tensor_trees import replace_leaves
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Regression, Sample
from tests.strategies.gradients.trainings import ranks_batches
from tests.strategies.parity import make_trainer, whole

BATCHES = 7


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


class Poisoned(Regression):
    """Makes gradients that are not finite in the chosen batches (counted over epochs), on one rank.

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

    def on_train_batch_end(self, *_: Any) -> None:
        """Lightning's own strategies know no norm."""


class Snapshot(NamedTuple):
    parameters: list[Tensor]
    optimizer: dict[str, Any]
    skipped: int
    scale: float


class Snapshots(Callback):
    """Copies of everything that a step changes, after every batch."""

    def __init__(self) -> None:
        self.taken: list[Snapshot] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        optimizer = pl_module.optimizers(use_pl_optimizer=False)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.taken.append(
            Snapshot(
                [whole(parameter.detach()).clone() for parameter in pl_module.parameters()],
                replace_leaves(optimizer.state_dict(), lambda tensor: whole(tensor).clone()),
                getattr(trainer.strategy, "skipped_steps", 0),
                1.0 if scaler is None else scaler.get_scale(),
            )
        )


def run(chosen: Any, module: LightningModule, left_out: tuple[int, ...] = (), **arguments: Any) -> list[Snapshot]:
    batches = [one for i, one in enumerate(ranks_batches(BATCHES)[dist.get_rank()]) if i not in left_out]
    snapshots = Snapshots()
    trainer = make_trainer(
        chosen, use_distributed_sampler=False, callbacks=[snapshots, *arguments.pop("callbacks", [])], **arguments
    )
    trainer.fit(module, big_batch.loader(batches))
    return snapshots.taken


def state_of(snapshot: Snapshot) -> tuple[Any, ...]:
    return snapshot.parameters, snapshot.optimizer["state"]
