"""A training that goes on from a checkpoint is the training that did not stop, bit for bit."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parstrat
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, loader, samples
from tests.strategies.parity import make_trainer

BATCHES = 6


class Dropping(LightningModule):
    """Draws random numbers in every step, and notes on what it was trained."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.seen.append(x.sum().item())
        return self.layers(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class StatefulLoader:
    """Knows where it is; each batch is drawn when it is fetched."""

    def __init__(self) -> None:
        self.position = 0
        self.begin_at = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.begin_at = self.begin_at, 0
        while self.position < BATCHES:
            self.position += 1
            yield torch.randn(4, 8) + self.position
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = state["position"]


def shuffled() -> Any:
    samples = torch.randn(BATCHES * 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    return DataLoader(TensorDataset(samples), batch_size=4, shuffle=True)


LOADERS = {"shuffled": shuffled, "stateful": StatefulLoader}


def strategy(kind: str, **arguments: Any) -> Any:
    return getattr(lightning_parstrat, kind)(**arguments)


class State(Callback):
    """What the training has come to."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.found = [parameter.detach().clone() for parameter in module.parameters()]
        for optimizer in trainer.strategy.optimizers:
            state = optimizer.state_dict()
            self.found += [entry for of in state["state"].values() for entry in of.values()]
            self.found += [torch.tensor(group["lr"]) for group in state["param_groups"]]


def fit(
    folder: str, kind: str, arguments: dict[str, Any], loader: str, path: str | None, seed: int, **trainer_args: Any
) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(seed + dist.get_rank())
    state, module = State(), Dropping(**trainer_args.pop("module", {}))
    saving = ModelCheckpoint(
        folder,
        "{step}",
        save_top_k=-1,
        every_n_train_steps=1,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    epochs = ModelCheckpoint(folder, "epoch{epoch}", save_top_k=-1, enable_version_counter=False)
    callbacks = [state, saving, epochs, *trainer_args.pop("callbacks", [])]
    trainer = make_trainer(
        strategy(kind, **arguments),
        callbacks=callbacks if path is None else [state, *callbacks[3:]],
        max_epochs=3,
        default_root_dir=folder,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        **trainer_args,
    )
    data = LOADERS[loader]()
    validation = shuffled() if trainer_args.get("val_check_interval") else None
    trainer.fit(module, data, validation, ckpt_path=path, weights_only=True)
    return state.found, module.seen


def resumed_is_uninterrupted(
    folder: str, kind: str, arguments: dict[str, Any], loader: str, name: str, **trainer_args: Any
) -> bool:
    torch.manual_seed(dist.get_rank())
    expected, seen = fit(folder, kind, arguments, loader, None, 0, **trainer_args)
    actual, seen_again = fit(folder, kind, arguments, loader, os.path.join(folder, name), 99, **trainer_args)
    return len(seen_again) < len(seen) and seen[-len(seen_again) :] == seen_again and distance(actual, expected) == 0


SHARDED = {"checkpoint_format": "sharded"}
# Both strategies and formats, both kinds of loaders, from within an epoch and from its end.
QUICK = [
    ("ZeRO1Strategy", SHARDED, "shuffled", "epochepoch=1.ckpt"),
    ("TunedDDPStrategy", {}, "shuffled", "epochepoch=0.ckpt"),
    ("ZeRO1Strategy", {}, "stateful", "step=6.ckpt"),
]
SLOW = [
    ("ZeRO1Strategy", {}, "shuffled", "epochepoch=0.ckpt"),
    ("ZeRO1Strategy", {}, "stateful", "epochepoch=0.ckpt"),
    ("ZeRO1Strategy", {}, "stateful", "step=7.ckpt"),
    ("ZeRO1Strategy", SHARDED, "stateful", "step=9.ckpt"),
    ("TunedDDPStrategy", {}, "stateful", "step=8.ckpt"),
]


def resumed_are_uninterrupted(folder: str, cases: list[Any]) -> list[bool]:
    return [resumed_is_uninterrupted(f"{folder}/{number}", *case) for number, case in enumerate(cases)]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_training_goes_on_as_if_it_had_not_stopped(pool: RankPool, tmp_path: Path, cases: list[Any]) -> None:
    assert pool.run(2, resumed_are_uninterrupted, str(tmp_path), cases) == [[True] * len(cases)] * 2


def resumed_on_three(folder: str, arguments: dict[str, Any], **trainer_args: Any) -> bool:
    try:
        # So large that Gloo divides the sum of a bucket among the ranks.
        module = {"width": 4000}
        case = (folder, "TunedDDPStrategy", arguments, "stateful", "step=8.ckpt")
        return resumed_is_uninterrupted(*case, module=module, **trainer_args)
    finally:
        torch.use_deterministic_algorithms(False)


def resumed_deterministically(folder: str, arguments: dict[str, Any]) -> bool:
    return resumed_on_three(folder, arguments, deterministic=True)


@pytest.mark.parametrize(
    ("resumed", "arguments"),
    [(resumed_on_three, {"bucket_cap_mb": 0.1}), pytest.param(resumed_deterministically, {}, marks=pytest.mark.slow)],
)
def test_buckets_that_are_not_made_anew_after_a_start_round_alike(
    pool: RankPool, tmp_path: Path, resumed: Any, arguments: dict[str, Any]
) -> None:
    """The sum of more than two numbers depends on their order, and that on the buckets."""
    arguments = arguments | {"find_unused_parameters": True}
    assert pool.run(3, resumed, str(tmp_path), arguments) == [True] * 3


class SaveAfter(Callback):
    """Saves after some batches, wherever in a window they are."""

    def __init__(self, folder: str, *batches: int) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if batch in self.batches:
            trainer.save_checkpoint(f"{self.folder}/inside{batch}.ckpt")


def windows_are_replayed(folder: str, arguments: dict[str, Any], batches: tuple[int, ...]) -> list[tuple[bool, bool]]:
    case, windows = (folder, "ZeRO1Strategy", arguments, "stateful"), {"accumulate_grad_batches": 3}
    expected, seen = fit(*case, None, 0, **windows, callbacks=[SaveAfter(folder, *batches)])
    found = []
    for batch in batches:
        actual, seen_again = fit(*case, f"{folder}/inside{batch}.ckpt", 99, **windows)
        found.append((seen[batch // 3 * 3 :] == seen_again, distance(actual, expected) == 0))
    return found


@pytest.mark.parametrize("in_shards", [False, True])
def test_an_open_window_is_trained_again(pool: RankPool, tmp_path: Path, in_shards: bool) -> None:
    arguments = {"expose_gradients": False, "shard_gradients": in_shards}
    batches = (4, 7) if in_shards else (0, 1, 4, 10)
    result = pool.run(2, windows_are_replayed, str(tmp_path), arguments, batches)
    assert result == [[(True, True)] * len(batches)] * 2


class Terminated(Callback):
    """Rank 1 is told to end in the middle of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def told_to_end(folder: str) -> list[tuple[Any, bool, bool]]:
    expected, seen = fit(folder, "ZeRO1Strategy", {}, "stateful", None, 0)
    found = []
    for number, (arguments, batch) in enumerate(TOLD):
        elsewhere = f"{folder}/{number}"
        last = ModelCheckpoint(elsewhere, monitor="never", save_top_k=0, save_last=True, enable_version_counter=False)
        ended: Any = None
        try:
            fit(folder, "ZeRO1Strategy", arguments, "stateful", None, 0, callbacks=[Terminated(batch), last])
        except SystemExit as exit:
            ended = exit.code
        actual, seen_again = fit(folder, "ZeRO1Strategy", arguments, "stateful", f"{elsewhere}/last.ckpt", 99)
        found.append((ended, seen[batch + 1 :] == seen_again, distance(actual, expected) == 0))
    return found


TOLD: list[tuple[dict[str, Any], int]] = [({}, 4), (SHARDED, 5), ({**SHARDED, "async_save": True}, 1)]


def test_sigterm_saves_the_last_where_training_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """Told in a batch, agreed on in it, saved when the next has been fetched, which counts not."""
    assert pool.run(2, told_to_end, str(tmp_path)) == [[(143, True, True)] * len(TOLD)] * 2


def resumed_twice(folder: str, arguments: dict[str, Any]) -> tuple[bool, bool]:
    """From the last batch of an epoch, and from what is saved within the next."""
    expected, seen = fit(folder, "ZeRO1Strategy", arguments, "stateful", None, 0)
    first, second = f"{folder}/step={BATCHES}.ckpt", f"{folder}/inside{BATCHES + 2}.ckpt"
    save = SaveAfter(folder, BATCHES + 2)
    fit(folder, "ZeRO1Strategy", arguments, "stateful", first, 50, callbacks=[save])
    actual, seen_again = fit(folder, "ZeRO1Strategy", arguments, "stateful", second, 99)
    return seen[BATCHES + 3 :] == seen_again, distance(actual, expected) == 0


@pytest.mark.parametrize("arguments", [pytest.param({}, marks=pytest.mark.slow), SHARDED], ids=["full", "sharded"])
def test_resuming_twice_is_resuming_once(pool: RankPool, tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert pool.run(2, resumed_twice, str(tmp_path), arguments) == [(True, True)] * 2


def progress_saved(folder: str, kind: str | None) -> dict[str, Any]:
    """How Lightning's loop over epochs counts, in the checkpoint of an epoch that the end of training has cut."""
    chosen = "ddp" if kind is None else strategy(kind)
    saving = ModelCheckpoint(folder, "{epoch}", enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = make_trainer(chosen, callbacks=[saving], max_steps=2, enable_checkpointing=True)
    trainer.fit(Dropping(), shuffled())
    return torch.load(saving.best_model_path, weights_only=True)["loops"]["fit_loop"]["epoch_progress"]


@pytest.mark.parametrize("kind", ["ZeRO1Strategy", "TunedDDPStrategy"])
def test_an_epoch_that_was_cut_short_is_saved_as_under_ddp(pool: RankPool, tmp_path: Path, kind: str) -> None:
    (expected,) = pool.run(1, progress_saved, str(tmp_path / "ddp"), None)
    assert pool.run(1, progress_saved, str(tmp_path / kind), kind) == [expected]


class SavesAt(Callback):
    """Saves at the end of some batches, by epoch and index, once each."""

    def __init__(self, paths: dict[tuple[int, int], str]) -> None:
        self.paths = dict(paths)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = self.paths.pop((trainer.current_epoch, batch_idx), None)
        if path is not None:
            trainer.save_checkpoint(path)


def epochs_begun_of_one_strategy(kind: str, folder: str) -> list[int]:
    """Trains, and resumes with the same strategy from the last batch of the first epoch."""
    first, second = f"{folder}/first.ckpt", f"{folder}/second.ckpt"
    trainer = make_trainer(strategy(kind), max_epochs=1, callbacks=[SavesAt({(0, 3): first, (1, 1): second})])
    trainer.fit(Regression(), loader(samples(4)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Regression(), loader(samples(4)), ckpt_path=first, weights_only=False)
    progress = torch.load(second, weights_only=False)["loops"]["fit_loop"]["epoch_progress"]
    return [progress["total"]["ready"], progress["total"]["processed"]]


@pytest.mark.parametrize("kind", ["TunedDDPStrategy", "ZeRO1Strategy"])
def test_a_second_training_of_a_strategy_that_resumes_at_the_end_of_an_epoch_counts_the_next(
    pool: RankPool, kind: str, tmp_path: Path
) -> None:
    assert pool.run(1, epochs_begun_of_one_strategy, kind, str(tmp_path)) == [[2, 1]]
