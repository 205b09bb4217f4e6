"""A training of one played rank, in phases."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.scale.models import Numbers, PlayedModel, Shapes
from benchmarks.scale.other_ranks import OtherRanks
from benchmarks.scale.playing import Plane, playing
from benchmarks.scale.recorder import Recorder
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

StrategyName = Literal["zero1_custom", "ddp", "ddp_tuned"]
Save = Literal["full", "sharded"]

PLANNED_ANEW, SETTLED = 2, 4
"""The batches before which zero1_custom plans anew, and from which on steps are alike."""


class PlayedEnvironment(ClusterEnvironment):
    """Says that all ranks have been started.

    Args:
        rank: Which one this is.
        size: How many there are.
        ranks_per_node: How many share a node.
    """

    def __init__(self, rank: int, size: int, ranks_per_node: int) -> None:
        super().__init__()
        self._rank, self._size, self._ranks_per_node = rank, size, ranks_per_node

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """Lightning comes to the same."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Lightning comes to the same."""

    def local_rank(self) -> int:
        return self._rank % self._ranks_per_node

    def node_rank(self) -> int:
        return self._rank // self._ranks_per_node


class _Phases(Callback):
    """Tells the recorder where in the training it is; has no hook in which gradients would have to be shown."""

    def __init__(self, recorder: Recorder, steps: int, save: Save | None, path: Path | None) -> None:
        self.recorder, self.steps, self.save, self.path = recorder, steps, save, path

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == PLANNED_ANEW:
            self.recorder.phase = "replan"
        elif batch_idx < SETTLED:
            self.recorder.phase = "first steps"
        else:
            self.recorder.phase = "step" if batch_idx < SETTLED + self.steps else "end"
        if self.recorder.phase == "end" and self.save is not None and self.path is not None:
            with self.recorder.during("full save" if self.save == "full" else "sharded save"):
                trainer.save_checkpoint(self.path)


class _WaitsOfReducer(Callback):
    """DDP's reducer waits in C++ for all of its buckets when backward ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self.recorder.wait_for_futures()


class Training(NamedTuple):
    """What is trained, how long, and how it is saved.

    Attributes:
        strategy: What trains.
        shapes: The model.
        cap_mb: Size of a bucket of the full model in MiB.
        steps: How many settled steps are recorded.
        save: How a checkpoint is saved; then rank 0 also goes on from it, in a second training.
        ranks_per_node: How many ranks share a node; fewer where there are fewer.
        arguments: Further ones of the strategy.
    """

    strategy: StrategyName
    shapes: Shapes
    cap_mb: float
    steps: int = 1
    save: Save | None = None
    ranks_per_node: int = 8
    arguments: Mapping[str, Any] = MappingProxyType({})


def play(training: Training, recorder: Recorder, rank: int, size: int, plane: Plane) -> None:
    """Plays a training.

    Args:
        training: What is trained.
        recorder: Gets the record.
        rank: Which rank is played.
        size: How many there are.
        plane: What carries gradients and parameters.
    """
    per_node = min(size, training.ranks_per_node)
    with playing(recorder, rank, size, plane, per_node, training.shapes.factor) as others:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved.ckpt"
            others.folder = Path(folder) / "temporary"
            batches = SETTLED + training.steps + 1
            fit(training, recorder, rank, size, batches, others, save_as=path)
            # Only rank 0 has all that is to be read.
            if training.save is not None and rank == 0:
                recorder.phase = "end"
                fit(training, recorder, rank, size, batches + 1, others, resumed=path)


def fit(
    training: Training,
    recorder: Recorder,
    rank: int,
    size: int,
    batches: int,
    others: OtherRanks | None = None,
    save_as: Path | None = None,
    resumed: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains in the default process group, which is there, whether its other ranks are played or real.

    Args:
        training: What is trained.
        recorder: Gets the record.
        rank: This one.
        size: How many there are.
        batches: After which it ends.
        others: What speaks for ranks that do not exist.
        save_as: Where a checkpoint is saved, after the settled steps.
        resumed: What it goes on from.
        callbacks: Further ones.
    """
    per_node = min(size, training.ranks_per_node)
    strategy = _make_strategy(training, PlayedEnvironment(rank, size, per_node))
    if others is not None:
        others.strategy = strategy if training.strategy == "zero1_custom" else None
    phases = _Phases(recorder, training.steps, training.save, save_as)
    # The reducer of zero1_custom waits in Python.
    of_reducer = [] if training.strategy == "zero1_custom" else [_WaitsOfReducer(recorder)]
    _note_loading(strategy, recorder)
    trainer = Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=size // per_node,
        strategy=strategy,
        precision="bf16-true" if training.shapes.dtype == torch.bfloat16 else "32-true",
        max_steps=batches,
        callbacks=[phases, *of_reducer, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = PlayedModel(training.shapes, _noting(recorder), registered_backward=True)
    trainer.fit(model, DataLoader(Numbers(size * batches)), ckpt_path=resumed)


def _make_strategy(training: Training, environment: ClusterEnvironment) -> Any:
    cap_mb = training.cap_mb / training.shapes.factor
    if training.strategy == "ddp":
        # DDP's own first bucket is of 1 MiB where others are of 25.
        caps = [cap_mb / 25, cap_mb]
        return DDPStrategy(cluster_environment=environment, bucket_cap_mb_list=caps, **training.arguments)
    arguments: dict[str, Any] = {"checkpoint_format": training.save or "full", **training.arguments}
    if training.strategy == "ddp_tuned":
        return TunedDDPStrategy(cluster_environment=environment, **arguments)
    return ZeRO1Strategy(cluster_environment=environment, bucket_cap_mb=cap_mb, **arguments)


def _noting(recorder: Recorder) -> Any:
    """Notes a computation; the first forward of a batch ends the planning before it."""

    def note(kind: Any, nbytes: int) -> None:
        if recorder.phase == "replan":
            recorder.phase = "first steps"
        recorder.compute(kind, nbytes)

    return note


def _note_loading(strategy: Any, recorder: Recorder) -> None:
    """Has what the strategy does to load a checkpoint recorded as such."""
    for name in ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"):
        setattr(strategy, name, _during(recorder, getattr(strategy, name)))


def _during(recorder: Recorder, load: Any) -> Any:
    def loading(*args: Any, **kwargs: Any) -> Any:
        with recorder.during("load"):
            return load(*args, **kwargs)

    return loading
