"""What the checkpoints of these tests are saved from and loaded into, and how they are read."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core.tensor_trees import in_storage_order, leaves
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.checkpoint.tensors import name_of
from lightning_parstrat.strategies.checkpoint.checkpoints import CHECKPOINT_KEY
from tests.strategies import zoo
from tests.strategies.cases import adafactor
from tests.strategies.parity import by_flag, ddp, train, zero1, zero3

tuned = partial(by_flag, TunedDDPStrategy, find_unused_parameters=True)
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": ddp,
    "single": lambda: None,
    "zero1": zero1,
    "zero2": partial(zero1, shard_gradients=True),
    # In groups of two ranks, each of which holds all of the state.
    "grouped": partial(zero1, shard_group=2),
    "tuned": tuned,
    "zero3": zero3,
    "zero3 grouped": partial(zero3, shard_group=2),
    "zero3 whole": partial(zero3, min_num_params=10**6),
}
FORMATS: dict[str, dict[str, Any]] = {
    "full": {},
    "sharded": {"state_dict_type": "sharded"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}


def make(strategy: str, form: str = "full") -> Any:
    return STRATEGIES[strategy](**FORMATS[form])


class StaysFrozen(zoo.Frozen):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


MODULES: dict[str, Callable[[], Any]] = {
    "convolutional": zoo.Convolutional,
    "scheduled": zoo.ScheduledTransformer,
    "gan": zoo.Adversarial,
    "tied": zoo.TiedLanguageModel,
    "adafactor": partial(zoo.Convolutional, adafactor),
    "frozen": StaysFrozen,
    "unfrozen": zoo.Frozen,
    "unused": zoo.Unused,
    "normalised": zoo.BatchNormalised,
}
GLOBAL_BATCH = 12
STEPS = 4
"""Of an epoch."""


def batches() -> dict[str, int]:
    """The same samples in each step on any number of ranks."""
    batch = GLOBAL_BATCH // dist.get_world_size()
    return {"samples_per_rank": STEPS * batch, "batch_size": batch}


def write(module: str, strategy: str, form: str, path: str) -> None:
    saving = ModelCheckpoint(dirpath=Path(path).parent, filename=Path(path).stem, save_top_k=-1)
    train(MODULES[module], make(strategy, form), callbacks=[saving], enable_checkpointing=True, **batches())


def load(path: Path) -> dict[str, Any]:
    """What a checkpoint of any format holds, with whole tensors."""
    if not path.is_dir():
        return torch.load(path, weights_only=True)
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    filled: dict[str, Any] = checkpoint.filled(checkpoint.skeleton)
    return filled


def without_own(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without what is not of the training's state: our own key, and the paths that callbacks note."""
    return {key: value for key, value in checkpoint.items() if key not in (CHECKPOINT_KEY, "callbacks")}


def elements_of(path: Path) -> dict[str, torch.Tensor]:
    """What the ranks' files hold, by the names of the tensors, 1-D."""
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    filled = {leaf.path: leaf.tensor for leaf in leaves(checkpoint.filled(checkpoint.skeleton))}
    named = {leaf.path: name_of(leaf.tensor) for leaf in leaves(checkpoint.skeleton)}
    return {name: in_storage_order(filled[where]) for where, name in named.items() if name is not None}
