"""Do the ranks still hold the same weights when a layer is unfrozen in the middle of a training?

    OMP_NUM_THREADS=1 python -m benchmarks.unfrozen --output benchmarks/results/unfrozen.json

A small module trains for four epochs on two local processes. Its first layer is frozen when training begins and
unfrozen before the third epoch: by the module's own `on_train_epoch_start`, or by Lightning's `BackboneFinetuning`.
torch's DistributedDataParallel looks at `requires_grad` once, when it wraps the module: what is unfrozen later, each
rank steps by its own gradient. Two numbers come out, each the largest over all weights when training has ended: how
far the ranks are from each other, and how far any of them is from one process that trained on the joint batch.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.machine import write_result
from benchmarks.peers import SINGLE_PROCESS
from benchmarks.quiet import QUIET
from benchmarks.ranks import become_ranks, global_rank

RANKS, EPOCHS, UNFREEZE_AT = 2, 4, 2
BATCHES, BATCH_SIZE = 8, 4
STRATEGIES = ("ddp", "ddp_find_unused_parameters_true", "ddp_tuned", "zero1_custom")


class Regression(LightningModule):
    """Two layers; what happens to `requires_grad` of the first is up to the kinds below."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.head(self.backbone(inputs)), targets)

    def configure_optimizers(self) -> Any:
        # An optimizer that gets the backbone's parameters later must not have them twice.
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class UnfreezesItself(Regression):
    """Freezes in `setup`, and unfreezes in a hook of its own."""

    def setup(self, stage: str) -> None:
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == UNFREEZE_AT:
            self.backbone.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def kinds() -> dict[str, tuple[type[Regression], list[Callback]]]:
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=UNFREEZE_AT, backbone_initial_lr=0.1)
    return {"own hook": (UnfreezesItself, []), "BackboneFinetuning": (Regression, [finetuning])}


class Weights(Callback):
    """All weights as they are when training ends, those of each rank in a row."""

    ranks: Tensor

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        own = nn.utils.parameters_to_vector(module.parameters()).detach()
        self.ranks = own.new_empty(trainer.world_size, own.numel())
        if trainer.world_size == 1:
            self.ranks[0] = own
        else:
            dist.all_gather(list(self.ranks), own)


def data() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(RANKS * BATCHES * BATCH_SIZE, 8, generator=generator)
    return TensorDataset(inputs, torch.sin(3 * inputs).sum(dim=1, keepdim=True))


def train(kind: str, strategy: str) -> Tensor:
    """The weights of every rank. In a single process a batch is what all ranks together would have in theirs."""
    alone = strategy == SINGLE_PROCESS
    seed_everything(7, verbose=False)
    module, callbacks = kinds()[kind]
    weights = Weights()
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if alone else RANKS,
        strategy=SingleDeviceStrategy(device=torch.device("cpu")) if alone else strategy,
        # Whose sampler would shuffle.
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        callbacks=[*callbacks, weights],
        **QUIET,
    )
    samples = data()
    dealt_out = None if alone else DistributedSampler(samples, RANKS, global_rank(), shuffle=False)
    batch_size = BATCH_SIZE * RANKS if alone else BATCH_SIZE
    trainer.fit(module(), DataLoader(samples, batch_size=batch_size, sampler=dealt_out))
    return weights.ranks


def largest_difference(some: Tensor, others: Tensor) -> float:
    """Of any weight on any rank; NaN where a weight is."""
    return float((some - others).abs().max())


def compare(kind: str) -> dict[str, Any]:
    """How far the ranks are from each other and from the single process, under each strategy."""
    (alone,) = train(kind, SINGLE_PROCESS)
    found = {}
    for strategy in STRATEGIES:
        ranks = train(kind, strategy)
        found[strategy] = {
            "between_ranks": largest_difference(ranks, ranks[0]),
            "to_single_process": largest_difference(ranks, alone),
        }
    return {"largest_weight": float(alone.abs().max()), **found}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    become_ranks(1, RANKS)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {kind: compare(kind) for kind in kinds()}
    if global_rank() != 0:
        return
    print(f"{'largest difference of a weight':53s} {'between ranks':>13s} {'to a single process':>21s}")
    for kind, found in results.items():
        for strategy in STRATEGIES:
            apart = found[strategy]
            print(f"{kind:20s} {strategy:32s} {apart['between_ranks']:13.1e} {apart['to_single_process']:21.1e}")
    shape = {"ranks": RANKS, "epochs": EPOCHS, "unfrozen_before_epoch": UNFREEZE_AT, "steps_per_epoch": BATCHES}
    write_result({**shape, "unfrozen": results}, arguments.output)


if __name__ == "__main__":
    main()
