"""Modules whose blocks are divided into stages, and their trainings."""

import random
import shutil
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune, weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MetricTracker, SumMetric

from lightning_parstrat import PipelineStrategy
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.torch_compat import has_memory
from tests.strategies import zoo
from tests.strategies.parity import Recorder, Run, make_trainer

WIDTH, WORDS, SAMPLES, BATCH, MICRO = 16, 24, 30, 8, 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(zoo.Zoo):
    """A language model with a tied matrix, and a parameter that no layer has. The last batch of an epoch is short."""

    dropout = 0.0
    block: Any = Block

    def build(self) -> None:
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Parameter(torch.randn(zoo.FEATURES - 1, WIDTH) / 10)
        self.blocks = nn.ModuleList(type(self).block(self.dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position[: tokens.shape[1]]

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 10).long() % WORDS
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.compute_loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        # No number of binary digits: in double precision it must stay what it is.
        self.log("samples", 0.1 * len(batch), reduce_fx="sum", sync_dist=True)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        tokens = (batch.abs() * 10).long() % WORDS
        return {"logits": self.logits(tokens[:, :-1]), "first": tokens[:, 0].tolist()}


class Grows(Block):
    """Its forward makes its buffers longer."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < 8:
            self.table, self.cache = torch.arange(8.0), torch.ones(8)
        return super().forward(x) * self.table[1] * self.cache[2]


class GrowsBuffers(Model):
    block = Grows


class KeepsStatistics(GrowsBuffers):
    """It has a mean of what comes before the blocks, which the loss needs, and the last loss, which is NaN at first."""

    def build(self) -> None:
        super().build()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("latest", torch.tensor(float("nan")))

    def compute_loss(self, batch: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(batch.mean())
        loss = super().compute_loss(batch) * (1 + (batch - self.mean).mean().square())
        self.latest.copy_(loss.detach())
        return loss


class Planned(Model):
    """Ranks may share the layers of its blocks."""

    def build(self) -> None:
        super().build()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class NormedWeights(Block):
    """Each forward computes a weight, and leaves it on the layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight_norm(self.up)
        prune.l1_unstructured(self.down, "weight", 0.3)


class NormsWeights(Model):
    block = NormedWeights


class NormsParts(Planned):
    """A norm between the layers that ranks share, which each rank has whole. One is frozen."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Unflatten(-1, (-1, 4)), nn.LayerNorm(4), nn.Flatten(-2))
        self.blocks[1].up[2].requires_grad_(False)
        self.tp_plan = {
            "blocks.*.up.0": "colwise",
            "blocks.*.up.2": "replicated_with_grad_allreduce",
            "blocks.*.down": "rowwise",
        }


class Compiled(Model):
    """Blocks are compiled in place, and what is outside of them as well."""

    def build(self) -> None:
        super().build()
        # Machine code would read the memory of tensors that have no values.
        backend = "inductor" if shutil.which("g++") else "aot_eager"
        for block in self.blocks:
            block.compile(backend=backend)
        self.norm = torch.compile(self.norm, backend=backend)
        self.embed = torch.compile(self.embed, backend=backend)


class Stops(Model):
    """Asks for the end of the fit after the blocks, in the second epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.should_stop = self.current_epoch == 1 and batch_idx == 1
        return loss


class HeadFirst(Model):
    """The head was registered before the blocks."""

    def build(self) -> None:
        super().build()
        own = dict(self.named_children())
        for name in own:
            delattr(self, name)
        self.last = nn.Linear(WIDTH, 24)
        for name, child in own.items():
            setattr(self, name, child)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class LeavesOut(Model):
    """Its state dict has a tied matrix twice, a number of its own, and no frozen layers."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.blocks[3].up.requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, frozen = super().state_dict(*args, **kwargs), ("teacher", "blocks.3.up")
        own = {name: one for name, one in state.items() if not name.startswith(frozen)}
        return {**own, "number": torch.ones(1)}


class ScaledByPython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + random.random() * self.down(F.gelu(self.up(self.norm(x))))


class DropsByPython(Model):
    """Blocks draw from Python's generator."""

    block = ScaledByPython


class DropsBetween(Model):
    """Features are dropped in blocks, before them and after them."""

    dropout = 0.2

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first in (0, 2):
            x = self.pair(first, x)
        return self.head(self.norm(x))

    def pair(self, first: int, x: Tensor) -> Tensor:
        x = self.blocks[first](F.dropout(x, 0.1))
        return F.dropout(self.blocks[first + 1](x * 1.1), 0.1) * 1.1


class Recomputes(DropsBetween):
    """Activation checkpointing is around two blocks, of which another stage may have the first."""

    def pair(self, first: int, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().pair, first, x, use_reentrant=False)
        return output


class CountsCalls(Block):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Wrapped(Model):
    """Torch's wrapper for activation checkpointing is around blocks: it hides its part of their parameters' names."""

    block = CountsCalls

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))


class SharesLayer(Model):
    """Blocks of different stages have a layer in common."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.up = self.blocks[0].up


class Halves(Model):
    """A hook changes gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for one in self.parameters():
            if one.grad is not None:
                one.grad.mul_(0.5)


class TiedAtTimes(Model):
    """The first stage uses the tied matrix in every other step."""

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = super().embed(tokens)
        return embedded if self.global_step % 2 == 0 else (embedded * 0).detach() + self.position[: tokens.shape[1]]


class Hooked(Model):
    """Hooks change what blocks return."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 1.1)


class Named(Block):
    """Returns a dictionary, as Hugging Face's blocks may, and counts its calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.up = spectral_norm(self.up)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        if self.training:
            self.calls.add_(1)
        return BaseModelOutput(last_hidden_state=super().forward(getattr(x, "last_hidden_state", x)))


class Normed(Model):
    """Statistics outside of blocks, a metric before them, blocks that return named tensors, and a mean over some."""

    block = Named

    def build(self) -> None:
        super().build()
        self.register_buffer("late", torch.zeros(2))
        self.statistics, self.last, self.seen = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), SumMetric()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.statistics(super().embed(tokens).transpose(1, 2)).transpose(1, 2)

    def logits(self, tokens: Tensor) -> Tensor:
        self.seen.update(len(tokens))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.last_hidden_state.transpose(1, 2)).transpose(1, 2))

    def on_train_epoch_start(self) -> None:
        self.seen.reset()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        positive = batch[batch > 0]
        if batch[0, 0] > 0:
            self.log("sometimes", positive.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("positive", positive.mean(), batch_size=len(positive), on_step=False, on_epoch=True)
        if self.global_step > 1:
            self.late = self.late + batch.mean()
        return loss


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += 0.1
        return super().forward(x)


class Unfreezes(Model):
    """The first blocks are trained from the second epoch on."""

    block = InPlace

    def on_train_epoch_start(self) -> None:
        for one in (self.embedding, *self.blocks[:2]):
            one.requires_grad_(self.current_epoch > 0)
        self.position.requires_grad_(self.current_epoch > 0)


class Joins(Model):
    """Its first blocks, and later what is around them, join the optimizer in groups of their own."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([one for block in self.blocks[2:] for one in block.parameters()])

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            self.join([one for block in self.blocks[:2] for one in block.parameters()])
        if batch_idx == 2 and self.current_epoch == 0:
            self.join([self.embedding.weight, self.position, *self.norm.parameters()])

    def join(self, parameters: list[Tensor]) -> None:
        self.optimizers(use_pl_optimizer=False).add_param_group({"params": parameters, "lr": 0.02})


class GetsOptimizers(Model):
    """Gets new optimizers after the first epoch's validation, and others in the third epoch's begin."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 0 and not self.trainer.sanity_checking:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [self.make_optimizer(self.parameters())]


class WritesInValidation(Model):
    """Hooks of a validation write to parameters, and freeze one."""

    @torch.no_grad()
    def on_validation_batch_end(self, *args: Any) -> None:
        self.blocks[3].down.bias.add_(0.01)

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.95)
        self.blocks[1].up.weight.requires_grad_(False)


class Viewed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


class ReturnsViews(Model):
    block = Viewed


class UnfreezesOnly(Unfreezes):
    """FSDP2 refuses blocks that change their input."""

    block = Block


class DropsOut(Model):
    dropout = 0.2


class DropsAndMasks(Model):
    """Drops out and draws around blocks: what the loss counts depends on the numbers that were drawn before.

    A hook draws on rank 0 alone, between batches and steps.
    """

    dropout = 0.2

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_rank == 0:
            torch.rand(3)

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.on_train_batch_start(batch, batch_idx)

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 10).long() % WORDS
        x = F.dropout(self.embed(tokens[:, :-1]), 0.3, self.training)
        # torch makes these of other operations that draw, if tensors have no values.
        x = torch.native_dropout(x, 0.2, self.training)[0]
        x = x + torch.empty_like(x).uniform_(0.0, 0.1)
        hidden = torch.rand(x.shape[:2]) < 0.3
        x = torch.where(hidden[..., None], 0.1, x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        weights = torch.rand(x.shape[:2])
        losses = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (losses * (hidden + weights).flatten()).mean()


class Depth:
    """An object that blocks change and return."""

    def __init__(self) -> None:
        self.number, self.unknown = 0, float("nan")


class CountsDepth(Block):
    def forward(self, x: Tensor, depth: Any, found: Any) -> Any:
        depth.number += 1
        depth.seen = x.shape[1]
        found["blocks"] += 1
        return super().forward(x) * (1 + depth.number / 10 + found["blocks"] / 100), depth, found


class GivesOn(Model):
    """Blocks give on what is no tensor, and have changed it."""

    block = CountsDepth

    def logits(self, tokens: Tensor) -> Tensor:
        x, depth, found = self.embed(tokens), Depth(), {"blocks": 0}
        for block in self.blocks:
            x, depth, found = block(x, depth, found)
        return self.head(self.norm(x)) / depth.number


class Lengths(Model):
    """Batches of other lengths, and a small network before the blocks."""

    def build(self) -> None:
        super().build()
        self.mixing = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = super().embed(tokens)
        return embedded + self.mixing(embedded)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch[:, : 6 + int(batch[0, 0].abs() * 100) % 3]


class Weighted(Model):
    """Samples count if their first number is positive. If a micro-batch has none, its loss is NaN."""

    least = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        weights = (batch[:, 0] > 0).float()
        tokens = (batch.abs() * 10).long() % WORDS
        losses = F.cross_entropy(self.logits(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        return {"loss": (losses * weights).sum() / weights.sum().clamp(min=self.least), "loss_weight": weights.sum()}


class Measured(Model):
    """Logs metrics and numbers, and computes metrics after each batch."""

    def build(self) -> None:
        super().build()
        self.total, self.all, self.running = SumMetric(), CatMetric(), SumMetric()
        self.sums: list[float] = []
        self.tracked = MetricTracker(SumMetric(), maximize=True)

    def on_validation_epoch_start(self) -> None:
        # It copies the metric.
        self.tracked.increment()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        loss = self.compute_loss(batch)
        self.total.update(batch.sum())
        self.all.update(loss)
        self.log("total", self.total)
        self.running(batch.sum())
        self.tracked.update(batch.sum())
        self.log("running", self.running, on_step=True)
        self.log_dict({"val": loss, "twice": 2 * loss}, batch_size=len(batch))
        self.log("most", batch.max(), reduce_fx="max")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.sums += [float(self.running.compute()), float(self.tracked.compute())]

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.all.compute().mean())


class WithStates(Recorder):
    """Notes parameters that this rank has, and the bytes that it holds of them and of optimizer state."""

    held = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.parameters.append([one.detach().clone() for one in pl_module.parameters() if has_memory(one)])
        self.losses.append((outputs["loss"] if isinstance(outputs, dict) else outputs).detach().clone())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        own = [local(one) for one in pl_module.parameters() if has_memory(one)]
        self.names = {name for name, one in pl_module.named_parameters() if has_memory(one)}
        states = [local(one) for state in trainer.optimizers[0].state.values() for one in state.values() if one.dim()]
        self.held = sum(one.nbytes for one in [*own, *states])


def pipeline(**arguments: Any) -> PipelineStrategy:
    return PipelineStrategy(**{"microbatches": MICRO, "partial_window": "lightning", **arguments})


def fit(
    module: type[zoo.Zoo], optimizer: Any, strategy: dict[str, Any] | None, epochs: int = 2, **arguments: Any
) -> tuple[Run, WithStates]:
    """Trains in stages, or on a single device (None)."""
    torch.manual_seed(0)
    made, recorder = module(optimizer), WithStates()
    callbacks = [recorder, *arguments.pop("callbacks", [])]
    chosen = None if strategy is None else pipeline(**strategy)
    trainer = make_trainer(chosen, callbacks=callbacks, max_epochs=epochs, **arguments)
    dtype = torch.float64 if arguments.get("precision") == "64-true" else torch.float32
    data = loader(trainer, dtype)
    trainer.fit(made, data, data)
    return Run(recorder.parameters, recorder.losses, made, trainer), recorder


def loader(trainer: Any, dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> Any:
    """The samples in order. The pipelines' batches together are one of a single process."""
    division = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return zoo.loader(samples, BATCH // division["num_replicas"], dtype, division["rank"], division["num_replicas"])


def rank() -> int:
    return dist.get_rank()
