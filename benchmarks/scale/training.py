"""A training of one played rank, in phases.

The model's parameters are real and its computation is none: each is read, and gets a gradient of zeros, in its turn.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quiet import QUIET
from benchmarks.ranks import rank_environment
from benchmarks.scale.playing import playing
from benchmarks.scale.recorder import Phase, Recorder
from lightning_parstrat import ZeRO1Strategy

Save = Literal["full", "sharded"]

TENSORS, ELEMENTS = 60, 4096
SETTLED = 4
"""The batch from which on steps are alike."""
FORWARD_SECONDS_PER_BYTE = 1e-9
RANKS_PER_NODE = 8
CAP_MB = 0.25


class _Turn(torch.autograd.Function):
    """A parameter's forward takes a while, and in backward its gradient does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, recorder: Recorder, seconds: float) -> Tensor:
        ctx.recorder, ctx.seconds = recorder, seconds
        recorder.seconds += seconds
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.recorder.seconds += 2 * ctx.seconds
        return gradient, None, None


class PlayedModel(LightningModule):
    """Many tensors of one size."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        made = {f"tensor_{number}": nn.Parameter(torch.zeros(ELEMENTS)) for number in range(TENSORS)}
        self.tensors = nn.ParameterDict(made)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.zeros(())
        for number in range(TENSORS):
            parameter = self.tensors[f"tensor_{number}"]
            # First read, which may have to wait for it, then compute; in backward the other way round.
            hidden = hidden + parameter[0]
            hidden = _Turn.apply(hidden, self._recorder, parameter.nbytes * FORWARD_SECONDS_PER_BYTE)
        return hidden

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Phases(Callback):
    """Tells the recorder where in the training it is; no hook of it has gradients shown."""

    def __init__(self, recorder: Recorder, save: Save | None, path: Path) -> None:
        self.recorder, self.save, self.path = recorder, save, path

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        begins: dict[int, Phase] = {0: "first steps", SETTLED: "step", SETTLED + 1: "end"}
        self.recorder.phase = begins.get(batch_idx, self.recorder.phase)
        if batch_idx == SETTLED + 1 and self.save is not None:
            with self.recorder.during("full save" if self.save == "full" else "sharded save"):
                trainer.save_checkpoint(self.path)


def play(arguments: Mapping[str, Any], save: Save | None, recorder: Recorder, rank: int, size: int) -> None:
    """Plays that rank of as many, with those arguments of the strategy; rank 0 goes on from what it saves."""
    arguments = {"bucket_cap_mb": CAP_MB, "state_dict_type": save or "full", **arguments}
    per_node = min(size, RANKS_PER_NODE)
    environment = rank_environment(rank // per_node, rank % per_node, size // per_node, per_node, "127.0.0.1", 0)
    with (
        mock.patch.dict(os.environ, environment),
        playing(recorder, rank, size, per_node) as others,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "saved.ckpt"
        others.folder = Path(folder) / "temporary"
        _fit(arguments, _Phases(recorder, save, path), size, None)
        # Only rank 0 has all that is to be read.
        if save is not None and rank == 0:
            recorder.phase = "end"
            _fit(arguments, _Phases(recorder, None, path), size, path)


def _fit(arguments: Mapping[str, Any], phases: _Phases, size: int, resumed: Path | None) -> None:
    per_node, batches = min(size, RANKS_PER_NODE), SETTLED + (3 if resumed else 2)
    trainer = Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=size // per_node,
        strategy=_make_strategy(arguments, phases.recorder),
        max_steps=batches,
        callbacks=[phases],
        **QUIET,
    )
    loader = DataLoader(TensorDataset(torch.zeros(size * batches, 1)))
    trainer.fit(PlayedModel(phases.recorder), loader, ckpt_path=resumed)


def _make_strategy(arguments: Mapping[str, Any], recorder: Recorder) -> ZeRO1Strategy:
    """What it does to load a checkpoint is counted as such."""

    def counted(load: Any) -> Any:
        def loading(*args: Any, **kwargs: Any) -> Any:
            with recorder.during("load"):
                return load(*args, **kwargs)

        return loading

    strategy = ZeRO1Strategy(**arguments)
    for name in ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"):
        setattr(strategy, name, counted(getattr(strategy, name)))
    return strategy
