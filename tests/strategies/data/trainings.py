"""Trainings that note on which samples they were trained, that are saved in hooks, and that go on."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import lightning_parstrat
from lightning_parstrat.strategies.lightning_compat import batches_that_stepped
from tests.comparing import distance
from tests.strategies.data.rows import BATCHES, START, STEPS, Numbered, Row, loader
from tests.strategies.parity import make_trainer
from tests.strategies.test_dataloaders import workers_allowed


class Sees(LightningModule):
    """Draws random numbers in every step, also of a validation, and notes which samples it was trained on."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, row.width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(row.width, 1))
        self.row = row
        self.seen: list[Any] = []
        self.trained: list[Tensor] = []

    def train_dataloader(self) -> Any:
        return self.row.make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
        samples = [None if part is None else part.reshape(-1, 8) for part in parts]
        self.seen.append([None if part is None else part[:, 0].int().tolist() for part in samples])
        return self.layers(torch.cat([part for part in samples if part is not None])).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        noise = torch.randn_like(batch)
        self.log("val", self.layers(batch + noise).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedulers: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]
        if "val_check_interval" in self.row.arguments:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.5)
            schedulers.append({"scheduler": plateau, "monitor": "val", "strict": False})
        return [optimizer], schedulers

    def on_train_end(self) -> None:
        (state,) = [optimizer.state_dict() for optimizer in self.trainer.strategy.optimizers]
        self.trained = [parameter.detach().clone() for parameter in self.parameters()]
        self.trained += [entry.clone() for of in state["state"].values() for entry in of.values()]
        self.trained += [torch.tensor(group["lr"]) for group in state["param_groups"]]


class Saves(Callback):
    """Saves when Lightning calls one of some hooks, and notes how many batches were trained on by then.

    Args:
        folder: Where to.
        after: After how many batches in hooks of a batch.
        hooks: In which.
    """

    def __init__(self, folder: str, after: Collection[int], hooks: tuple[str, ...] = BATCHES[1:]) -> None:
        self.folder, self.after = folder, after
        self.saved: dict[str, int] = {}
        for hook in hooks:
            setattr(self, hook, self._saving_in(hook))

    def _saving_in(self, hook: str) -> Callable[..., None]:
        def save(trainer: Trainer, *_: Any) -> None:
            batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
            if not trainer.sanity_checking and (hook not in (*BATCHES, *STEPS) or batches in self.after):
                name = f"{hook} {sum(one.startswith(hook) for one in self.saved)}"
                self.saved[name] = batches
                trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

        return save


class Training(NamedTuple):
    """What a training came to: on which samples, step by step, with which parameters and state; and what it said."""

    seen: list[Any]
    parameters: list[Tensor]
    loaded: int
    said: list[str]
    counts: tuple[int, ...]


def trainer_and_module(row: Row, seed: int, *callbacks: Callback, **more: Any) -> tuple[Trainer, Sees]:
    torch.manual_seed(seed)
    module = Sees(row)
    strategy = getattr(lightning_parstrat, row.kind)(**{"bucket_cap_mb": 0.001, **row.strategy})
    return make_trainer(strategy, callbacks=list(callbacks), **{"max_epochs": 2, **row.arguments, **more}), module


def fit(row: Row, seed: int, *callbacks: Callback, path: str | None = None, **more: Any) -> Training:
    trainer, module = trainer_and_module(row, seed, *callbacks, **more)
    made = None if row.from_module else row.make()
    validation = loader(8) if "val_check_interval" in {**row.arguments, **more} else None
    Numbered.loaded = 0
    with workers_allowed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, made, made if row.validates_too else validation, ckpt_path=path, weights_only=True)
    # Where nothing was left to train on, training has not ended.
    trained = module.trained or [parameter.detach().clone() for parameter in module.parameters()]
    # What decides about validations, ends of epochs, and the steps of loggers.
    counts = trainer.fit_loop.epoch_loop.batch_progress.total.ready, batches_that_stepped(trainer), trainer.global_step
    return Training(module.seen, trained, Numbered.loaded, [str(one.message) for one in caught], counts)


def differences(
    folder: str, row: Row, expected: Training, saved: Mapping[str, int], twice: bool = False
) -> dict[str, Any]:
    """For each save: what differs between the training that went on from it and the one that never stopped.

    If ``twice``, what goes on is saved when it starts and in hooks of batches, and goes on from there, too.
    """
    found: dict[str, Any] = {}
    window = row.arguments.get("accumulate_grad_batches", 1)
    for name, batches in saved.items():
        again = Saves(f"{folder}/from {name}", row.after if twice else (), (START, *row.hooks[2:]) if twice else ())
        actual = fit(row, 99 + dist.get_rank(), again, path=f"{folder}/{name}.ckpt")
        # In a training that has come to its end, nothing starts.
        if twice and batches < len(expected.seen):
            found |= differences(again.folder, row, expected, {**again.saved, f"{START} 0": batches})
        begun = len(expected.seen) - len(actual.seen)
        same = batches - window < begun <= batches and actual.seen == expected.seen[begun:]
        difference = distance(actual.parameters, expected.parameters[: len(actual.parameters)])
        doubts = [one for one in actual.said if "resuming from a checkpoint" in one or "samples again" in one]
        # In a training that has come to its end, nothing is counted.
        is_same = batches == len(expected.seen) or actual.counts == expected.counts
        counts = () if is_same else (actual.counts, expected.counts)
        if not same or difference != 0 or doubts or counts:
            found[f"{folder} {name}"] = (batches, begun, same, difference, doubts, counts)
    return found
