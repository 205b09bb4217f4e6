"""What needs a GPU, or may go wrong on one, at world size 1: captured graphs, saves in training."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests import devices
from tests.comparing import assert_same
from tests.gpu.trainings import Layers, fit
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import delayed, late
from tests.strategies.odd import Blocks
from tests.strategies.parity import by_flag, largest_difference, looks_at_no_gradient, train

STRATEGIES: dict[str, Callable[..., Any]] = {
    "by flag": by_flag,
    "late": late,
    "delayed": delayed,
    "in shards": partial(late, shard_gradients=True),
}
# Captured kernels may sum in another order.
TOLERANCE = 1e-4


class Captured(Blocks):
    """Blocks as CUDA graphs, captured when training begins: by then parameters lie where they stay."""

    def capture(self) -> None:
        for block in self.blocks:
            sample = torch.randn(4, zoo.FEATURES, device=devices.device(), requires_grad=True)
            torch.cuda.make_graphed_callables(block, (sample,))

    def on_train_start(self) -> None:
        self.capture()


def compare_captured(strategy: str, arguments: dict[str, Any]) -> float:
    policy = {"gradient_clip_val": 0.1, "validate": True, **arguments}
    # A captured backward writes a gradient where it wrote the one before. Torch accumulates that one, too: in
    # `Parameter.grad`, which is the same memory. "in shards" takes each gradient as it comes.
    is_right = strategy == "in shards"
    expected = train(Blocks if is_right else Captured, None, **policy)
    actual = train(Captured, STRATEGIES[strategy](), **policy)
    return largest_difference(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_captured_blocks_replay_with_what_was_stepped(
    ranks: RankPool, cuda: str, strategy: str, arguments: dict[str, Any]
) -> None:
    assert ranks.run(1, compare_captured, strategy, arguments)[0] <= TOLERANCE


@looks_at_no_gradient
class Keeps(Callback):
    """What a checkpoint of each step should hold."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weights, optimizer = pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"]
        self.states[trainer.global_step] = on_host({"weights": weights, "state": optimizer})


def on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.copy(value)


def save_every_step(strategy: str, width: int, folder: str) -> int:
    keeps = Keeps()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(
        Layers(width, 8),
        STRATEGIES[strategy](state_dict_type="sharded", async_save=True),
        6,
        callbacks=[keeps, saves],
        enable_checkpointing=True,
    )
    for step, expected in keeps.states.items():
        saved = ShardedCheckpoint(Path(folder) / f"step={step}.ckpt", weights_only=True)
        whole = saved.filled(saved.skeleton)
        found = {"weights": whole["state_dict"], "state": whole["optimizer_states"][0]["state"]}
        assert_same(on_host(found), expected)
    return len(keeps.states)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_while_training_goes_on_is_the_step_it_was_asked_for(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    width = 1024 if ranks.device == "cuda" else 64
    assert ranks.run(1, save_every_step, strategy, width, str(tmp_path)) == [6]
