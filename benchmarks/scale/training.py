"""A training of one played rank, in phases."""

import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.scale.models import Numbers, PlayedModel, Shapes
from benchmarks.scale.playing import Plane, playing
from benchmarks.scale.recorder import Recorder
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

StrategyName = Literal["zero1_custom", "ddp", "ddp_tuned"]
Save = Literal["full", "sharded"]

_PLANNED_ANEW, _SETTLED = 2, 4
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

    def __init__(self, recorder: Recorder, steps: int, save: Save | None, path: Path) -> None:
        self.recorder, self.steps, self.save, self.path = recorder, steps, save, path

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == _PLANNED_ANEW:
            self.recorder.phase = "replan"
        elif batch_idx < _SETTLED:
            self.recorder.phase = "first steps"
        else:
            self.recorder.phase = "step" if batch_idx < _SETTLED + self.steps else "end"
        if self.recorder.phase == "end" and self.save is not None and not trainer.ckpt_path:
            with self.recorder.during("full save" if self.save == "full" else "sharded save"):
                trainer.save_checkpoint(self.path)


class _WaitsOfReducer(Callback):
    """DDP's reducer waits in C++ for all of its buckets when backward ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self.recorder.wait_for_futures()


def play(
    recorder: Recorder,
    strategy: StrategyName,
    shapes: Shapes,
    rank: int,
    size: int,
    plane: Plane,
    cap_mb: float,
    steps: int = 1,
    save: Save | None = None,
    ranks_per_node: int = 8,
    **arguments: Any,
) -> None:
    """Plays a training: some steps, one save if asked for, and a second training that goes on from it.

    Args:
        recorder: Gets the record.
        strategy: What trains.
        shapes: The model.
        rank: Which rank is played.
        size: How many there are.
        plane: What carries gradients and parameters.
        cap_mb: Size of a bucket of the full model in MiB.
        steps: How many settled steps are recorded.
        save: How the checkpoint is saved.
        ranks_per_node: How many ranks share a node; fewer where there are fewer.
        **arguments: Further ones of the strategy.
    """
    per_node = min(size, ranks_per_node)
    made = {"save": save, **arguments}
    world = playing(recorder, rank, size, plane, per_node, shapes.factor)
    with world as others, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.ckpt"
        environment = PlayedEnvironment(rank, size, per_node)

        def fit(batches: int, resumed: Path | None) -> None:
            trained = _make_strategy(strategy, cap_mb / shapes.factor, environment, made)
            others.strategy = trained if strategy == "zero1_custom" else None
            callbacks: list[Callback] = [_Phases(recorder, steps, save, path)]
            if strategy != "zero1_custom":
                callbacks.append(_WaitsOfReducer(recorder))
            _note_loading(trained, recorder)
            trainer = Trainer(
                accelerator="cpu",
                devices=per_node,
                num_nodes=size // per_node,
                strategy=trained,
                precision="bf16-true" if shapes.dtype == torch.bfloat16 else "32-true",
                max_steps=batches,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            model = PlayedModel(shapes, _noting(recorder), registered_backward=True)
            trainer.fit(model, DataLoader(Numbers(size * batches)), ckpt_path=resumed)

        batches = _SETTLED + steps + 1
        fit(batches, None)
        # Only rank 0 has all that is to be read.
        if save is not None and rank == 0:
            recorder.phase = "end"
            fit(batches + 1, path)


def _make_strategy(name: StrategyName, cap_mb: float, environment: ClusterEnvironment, made: dict[str, Any]) -> Any:
    arguments = {key: value for key, value in made.items() if key != "save"}
    if name == "ddp":
        # DDP's own first bucket is of 1 MiB where others are of 25.
        caps = [cap_mb / 25, cap_mb]
        return DDPStrategy(cluster_environment=environment, bucket_cap_mb_list=caps, **arguments)
    saved = {"checkpoint_format": made["save"] or "full"}
    if name == "ddp_tuned":
        return TunedDDPStrategy(cluster_environment=environment, **saved, **arguments)
    return ZeRO1Strategy(cluster_environment=environment, bucket_cap_mb=cap_mb, **saved, **arguments)


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
