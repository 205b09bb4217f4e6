"""Modules with tensor-parallel plans, and their trainings on ranks that share layers."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint
from torchmetrics import SumMetric

from tests.strategies import zoo
from tests.strategies.parity import Recorder, Run, make_trainer, zero3

WIDTH, HEADS, WORDS, SAMPLES, BATCH = 16, 4, 24, 32, 8
PLAN: dict[str, Any] = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # The gradient of a bias would be nothing but rounding.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.num_heads, self.size = HEADS, WIDTH // HEADS

    def heads(self, one: Tensor) -> Tensor:
        return one.view(*one.shape[:2], -1, self.size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.heads(layer(x)) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class ReadsHeads(Attention):
    """Fits the plan, and views as many heads as all ranks have."""

    def heads(self, one: Tensor) -> Tensor:
        return one.view(*one.shape[:2], self.num_heads, -1).transpose(1, 2)


class CalledByMethod(Attention):
    """Its module calls a method of it, so that its code cannot be checked."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class MayReadHeads(Attention):
    """Some of them view as many heads as all ranks have."""

    reads = False

    def heads(self, one: Tensor) -> Tensor:
        heads = self.num_heads if self.reads else -1
        return one.view(*one.shape[:2], heads, one.shape[-1] // heads if self.reads else self.size).transpose(1, 2)


class NormedHeads(Attention):
    """A norm that the plan leaves whole, between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.size)

    def heads(self, one: Tensor) -> Tensor:
        return self.norm(super().heads(one))


class MixedHeads(Attention):
    """A layer that the plan leaves whole takes what a cut one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, one: Tensor) -> Tensor:
        return super().heads(self.mix(one))


class StatisticsOfHeads(Attention):
    """A norm without parameters takes its statistics over all heads, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(self.size, affine=False)

    def heads(self, one: Tensor) -> Tensor:
        return self.norm(super().heads(one).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def zeroed(attention: type[Attention]) -> type[Attention]:
    """Its output is 0 until it has learned."""

    def __init__(self: Any) -> None:
        attention.__init__(self)
        nn.init.zeros_(self.out.weight)

    return type(f"Zeroed{attention.__name__}", (attention,), {"__init__": __init__})


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], dropout: float, inner_dropout: float) -> None:
        super().__init__()
        self.attention, self.norm = attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.inner_dropout = nn.Dropout(dropout), nn.Dropout(inner_dropout)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.dropout(self.attention(self.norm(x)))
        x = x + attended
        inner = self.inner_dropout(F.gelu(self.up(x)))
        self.dropped = attended == 0, inner == 0
        return x + self.dropout(self.down(inner))


class HalfCheckpointed(Block):
    """Activation checkpointing ends, and begins, between the layers that are cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        inner = checkpoint(lambda x: self.inner_dropout(F.gelu(self.up(x))), x, use_reentrant=False)
        return x + checkpoint(lambda inner: self.dropout(self.down(inner)), inner, use_reentrant=False)


class Transformer(zoo.Zoo):
    """A language model. Its plan cuts the blocks. Dropout between cut layers is inner dropout."""

    attention: Callable[[], nn.Module] = Attention
    block: type[Block] = Block
    dropout = inner_dropout = 0.0
    tp_plan: dict[str, Any] = PLAN

    def build(self) -> None:
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        make = type(self).attention
        self.blocks = nn.ModuleList(self.block(make, self.dropout, self.inner_dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 10).long() % WORDS
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def with_class(name: str, **attributes: Any) -> type[Transformer]:
    return type(name, (Transformer,), attributes)


DropsOut = with_class("DropsOut", dropout=0.2)
DropsParts = with_class("DropsParts", dropout=0.2, inner_dropout=0.5)
CutShort = with_class("CutShort", dropout=0.2, inner_dropout=0.5, block=HalfCheckpointed)
# Vocabularies are cut, too.
CutAll = with_class("CutAll", tp_plan={**PLAN, "embedding": "embedding_rowwise", "head": "colwise_gather_output"})


class NormsHeads(Transformer):
    """One of the norms is frozen."""

    attention = NormedHeads
    tp_plan: ClassVar[dict[str, str]] = {**PLAN, "blocks.*.attention.norm": "replicated_with_grad_allreduce"}

    def build(self) -> None:
        super().build()
        self.blocks[1].attention.norm.requires_grad_(False)


class SecondReadsHeads(Transformer):
    attention = MayReadHeads

    def build(self) -> None:
        super().build()
        self.blocks[1].attention.reads = True


class Compiled(Transformer):
    """Its blocks are compiled."""

    graphs: ClassVar[list[Any]] = []

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend=self.note)

    def on_train_end(self) -> None:
        assert self.graphs
        self.graphs.clear()

    @classmethod
    def note(cls, graph: Any, inputs: Any) -> Any:
        cls.graphs.append(graph)
        return graph


class Tied(CutAll):
    """A shared matrix stays whole."""

    def build(self) -> None:
        super().build()
        self.head.weight = self.embedding.weight


class InSequence(Transformer):
    """Between the blocks' layers, each rank has a part of the sequence, by torch's own styles."""

    tp_plan: dict[str, Any] = {  # noqa: RUF012
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.attention.query": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.attention.key": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.attention.value": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def compute_loss(self, batch: Tensor) -> Tensor:
        # The ranks divide the length.
        return super().compute_loss(batch[:, :9])


class OddSequence(InSequence):
    tp_plan: dict[str, Any] = {  # noqa: RUF012
        **InSequence.tp_plan,
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-2)),
    }

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch[:, :8])


class Averages(Block):
    """Between cut layers it has an average of all features, of which each rank computes a part of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)) * x.mean(-1, keepdim=True))


class AveragesBetween(Transformer):
    block = Averages


class PenalisesParts(Transformer):
    """Its loss has what a cut layer returns, of which each rank has a part."""

    factor = 0.1

    def on_train_start(self) -> None:
        self.blocks[0].up.register_forward_hook(lambda module, args, output: self.parts.append(output))

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.parts: list[Tensor] = []
        return super().compute_loss(batch) + self.factor * sum(part.square().mean() for part in self.parts)


class PenalisesPartsALittle(PenalisesParts):
    factor = 1e-6


class Penalised(Transformer):
    """Its loss has a gradient in it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        embedded: list[Tensor] = []
        handle = self.embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
        loss = self.compute_loss(batch)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + gradient.square().sum()


class Counts(Transformer):
    """Logs sums and a metric, of which copies can be made."""

    def build(self) -> None:
        super().build()
        self.total = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total.update(batch.sum())
        copy.deepcopy(self.total), pickle.loads(pickle.dumps(self.total))
        self.log("total", self.total)
        self.log("sum", batch.sum(), reduce_fx="sum", sync_dist=True)
        self.log("mean", batch.mean(), sync_dist=True)


class Llama(zoo.Zoo):
    """Hugging Face's model, with its own plan."""

    def build(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 200).long() % 512
        return self.model(input_ids=tokens, labels=tokens).loss


def fit(module: type[zoo.Zoo], optimizer: Any, size: int | None, strategy: dict[str, Any], **arguments: Any) -> Run:
    """Trains with layers that so many ranks share, or on a single device (None)."""
    resumed = arguments.pop("ckpt_path", None)
    torch.manual_seed(0 if resumed is None else 1)
    made, recorder = module(optimizer), Recorder()
    chosen = None if size is None else zero3(tensor_parallel_size=size, **strategy)
    replicas = 1 if size is None else dist.get_world_size() // size
    rank = 0 if size is None else dist.get_rank() // size
    dtype = torch.float64 if arguments.get("precision") == "64-true" else torch.float32
    data = zoo.loader(SAMPLES, BATCH // replicas, dtype, rank, replicas)
    callbacks = [recorder, *arguments.pop("callbacks", [])]
    trainer = make_trainer(chosen, callbacks=callbacks, **{"max_epochs": 2, **arguments})
    trainer.fit(made, data, data if module is Counts else None, ckpt_path=resumed, weights_only=False)
    return Run(recorder.parameters, recorder.losses, made, trainer)
