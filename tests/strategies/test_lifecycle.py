"""Everything around the steps: what a Trainer does before, between and after them."""

import copy
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_parstrat import TunedDDPStrategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import ddp, make_trainer, train, zero1


class SeenSamples(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self.seen[-1] += batch[:, 0].tolist()


def samples_seen(strategy: str) -> list[list[float]]:
    seen = SeenSamples()
    trainer = make_trainer(ddp() if strategy == "ddp" else zero1(), max_epochs=3, callbacks=[seen])
    trainer.fit(zoo.MLP(), DataLoader(zoo.Samples(24), batch_size=4, shuffle=True))
    return seen.seen


def test_the_sampler_is_distributed_and_reshuffled_each_epoch_as_under_ddp(pool: RankPool) -> None:
    ours, theirs = pool.run(2, samples_seen, "zero1"), pool.run(2, samples_seen, "ddp")
    assert ours == theirs
    first, second = ours[0][0], ours[1][0]
    assert not set(first) & set(second) and len(first) == len(second) == 12
    assert ours[0][0] != ours[0][1]


class CopiesCallbacks(Callback):
    """Copies callbacks in a training, and keeps those of its beginning."""

    def __init__(self) -> None:
        self.first: list[Callback] = []
        self.last: list[Callback] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = list(trainer.callbacks)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.last = copy.deepcopy([one for one in trainer.callbacks if one is not self])
        # Lightning's progress bar, for one, has the trainer.
        copy.deepcopy(trainer, {id(self): None})


def copy_and_pickle(strategy: str) -> tuple[int, int]:
    copies = CopiesCallbacks()
    kind = zero1() if strategy == "zero1_custom" else TunedDDPStrategy()
    trainer = make_trainer(kind, max_epochs=1, callbacks=copies)
    trainer.fit(zoo.MLP(), zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size()))
    assert "SavesWhenPreempted" in [type(one).__name__ for one in copies.last]
    assert copies.first == trainer.callbacks
    copies.last.clear()
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    return torch.load(file, weights_only=False).global_step, trainer.global_step


def test_callbacks_are_copied_in_a_training_and_a_trainer_pickled_after_it(pool: RankPool) -> None:
    for strategy in ("zero1_custom", "ddp_tuned"):
        for restored, steps in pool.run(2, copy_and_pickle, strategy):
            assert restored == steps > 0


def count_calls(strategy: str, folder: str) -> tuple[int, int]:
    """What Lightning's own tests count: backwards of the strategy, and calls of `torch.save`."""
    saves = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1)
    kind = zero1() if strategy == "zero1_custom" else TunedDDPStrategy()
    trainer = make_trainer(kind, max_steps=3, callbacks=saves, enable_checkpointing=True)
    counts_backwards = mock.patch.object(Strategy, "backward", wraps=trainer.strategy.backward)
    with counts_backwards as backward, mock.patch("torch.save") as save:
        trainer.fit(zoo.MLP(), zoo.loader(16, 4))
    return backward.call_count, save.call_count


@pytest.mark.parametrize("strategy", ["zero1_custom", "ddp_tuned"])
def test_a_backward_and_a_save_are_lightnings(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    assert pool.run(1, count_calls, strategy, str(tmp_path)) == [(3, 3)]


class PartialCheckpoint(zoo.MLP):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"net.0.bias": checkpoint["state_dict"]["net.0.bias"]}
        checkpoint["optimizer_states"] = []


def save_partially(folder: str) -> None:
    saves = ModelCheckpoint(folder, "part", every_n_train_steps=5)
    train(PartialCheckpoint, zero1(bucket_cap_mb=8), callbacks=[saves], enable_checkpointing=True)


def test_a_partial_checkpoint_does_not_bring_whole_buckets_along(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save_partially, str(tmp_path))
    saved = torch.load(tmp_path / "part.ckpt", weights_only=True)["state_dict"]["net.0.bias"]
    assert saved.untyped_storage().nbytes() == saved.nbytes


def test_a_decision_before_a_training_is_the_process_s_own() -> None:
    assert [zero1().reduce_boolean_decision(one) for one in (True, False)] == [True, False]
