"""Trainings as users write them, by the flags' default arguments: 60 steps end where those of ``ddp`` end.

A small GPT with a tied embedding, a residual network with BatchNorm and a frozen stem, an LSTM with an embedding; with
dropout, a schedule with a warm-up, accumulation, clipping, and in bf16, too. Ranks are seeded differently, as in a
program without a seed: what training begins with is rank 0's, and no rank draws a random number that it does not draw
under ``ddp``.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests import devices
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.parity import ddp, looks_at_no_gradient, make_trainer, whole

STEPS, ACCUMULATED, EPOCHS = 60, 3, 2
BATCHES = STEPS * ACCUMULATED // EPOCHS
VOCABULARY, LENGTH = 37, 12
SEED = 10


class Real(LightningModule):
    """Base: tokens or images in, a cross entropy out; a schedule that warms up for ten steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.compute_loss(*batch)

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 10)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[10])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GPT(Real):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, bias=False) for _ in range(2)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def compute_loss(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=self.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        decays = [one for one in self.parameters() if one.ndim > 1]
        others = [one for one in self.parameters() if one.ndim < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return self.scheduled(torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)))


class ResNet(Real):
    """With a stem that does not train. At the kink of a ReLU a rounding becomes 1 %, by ``ddp``, too: it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU()),
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def compute_loss(self, tokens: Tensor) -> Tensor:
        hidden = F.silu(self.stem(tokens[:, :9].float().div(VOCABULARY).sub(0.5).view(-1, 1, 3, 3)))
        for block in self.blocks:
            hidden = F.silu(hidden + block(hidden))
        return F.cross_entropy(self.head(hidden.mean((2, 3))), tokens[:, 0] % 5)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        return self.scheduled(torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True))


class LSTM(Real):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def compute_loss(self, tokens: Tensor) -> Tensor:
        # Not every CPU has this in bf16.
        with torch.autocast(self.device.type, enabled=False):
            hidden, _ = self.lstm(self.tokens(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return self.scheduled(torch.optim.Adam(self.parameters(), lr=3e-3))


MODULES: dict[str, type[Real]] = {"GPT": GPT, "ResNet": ResNet, "LSTM": LSTM}
STRATEGIES = ("zero1_custom", "zero2_custom", "zero3_custom", "ddp_tuned")
TOLERANCES = {
    "32-true": {"GPT": 1e-4, "ResNet": 1e-4, "LSTM": 1e-4},
    # BatchNorm makes much of what is rounded.
    "bf16-mixed": {"GPT": 0.06, "ResNet": 0.25, "LSTM": 0.06},
}


@looks_at_no_gradient
class Looks(Callback):
    """Notes the values that training begins with, all losses, and generators' states as far as the third step."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.generators: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = values_of(pl_module)
        self._note()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        if trainer.global_step <= 3:
            self._note()

    def _note(self) -> None:
        numbers = [str(one) for one in (random.getstate(), numpy.random.get_state())]
        numbers += [str(torch.cuda.get_rng_state().tolist())] if devices.kind() == "cuda" else []
        self.generators.append([torch.get_rng_state().tolist(), *numbers])


def values_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, whole, on the host."""
    return [whole(value.detach()).to("cpu", copy=True) for value in module.state_dict().values()]


class Trained(NamedTuple):
    looks: Looks
    last: list[Tensor]


def sentences(rank: int, world_size: int) -> DataLoader:
    """Every token follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(3)
    count = 4 * BATCHES * world_size
    tokens = [torch.randint(VOCABULARY, (count,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.rand(count, generator=generator) < 0.1
        tokens.append(torch.where(noise, torch.randint(VOCABULARY, (count,), generator=generator), tokens[-1] * 3 + 1))
        tokens[-1] %= VOCABULARY
    return DataLoader(TensorDataset(torch.stack(tokens, 1)[rank::world_size]), batch_size=4)


def train(make: Callable[[], Real], strategy: Any, precision: str) -> Trained:
    rank, looks = dist.get_rank(), Looks()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(SEED + rank)
    module = make()
    make_trainer(
        strategy,
        callbacks=[looks],
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        precision=precision,
        use_distributed_sampler=False,
    ).fit(module, sentences(rank, dist.get_world_size()))
    assert module.trainer.global_step == STEPS
    return Trained(looks, values_of(module))


@cache
def by_ddp(name: str, precision: str, world_size: int) -> Trained:
    return train(MODULES[name], ddp(), precision)


def apart(actual: Trained, expected: Trained) -> float:
    """Of the last values, relative to how far each tensor has moved; of losses, relative to the first."""
    values = [
        (ours - theirs).double().norm() / (theirs - first).double().norm().clamp(min=1e-2)
        for ours, theirs, first in zip(actual.last, expected.last, expected.looks.first, strict=True)
    ]
    ours, theirs = (torch.stack(one.looks.losses).float() for one in (actual, expected))
    return worst(values, (ours - theirs).abs() / theirs[0].abs())


class Found(NamedTuple):
    from_rank_0: float
    draws: list[bool]
    apart: float
    first_loss: float
    last_loss: float


def compare(name: str, strategy: str, precision: str) -> Found:
    expected = by_ddp(name, precision, dist.get_world_size())
    actual = train(MODULES[name], strategy, precision)
    torch.manual_seed(SEED)
    of_rank_0 = list(MODULES[name]().state_dict().values())
    ours, theirs = actual.looks, expected.looks
    losses = [float(one) for one in ours.losses]
    return Found(
        distance(ours.first, of_rank_0),
        [one == other for one, other in zip(ours.generators, theirs.generators, strict=True)],
        apart(actual, expected),
        sum(losses[:9]),
        sum(losses[-9:]),
    )


# Every module by every strategy, in 32 bits or mixed, on two ranks or three, by turns.
GRID = [
    (name, strategy, list(TOLERANCES)[(number + turn) % 2], 2 + (number + turn // 2) % 2)
    for number, name in enumerate(MODULES)
    for turn, strategy in enumerate(STRATEGIES)
]
QUICK = (("GPT", "zero1_custom"), ("ResNet", "zero3_custom"))


@pytest.mark.parametrize(
    ("name", "strategy", "precision", "world_size"), slow_unless(lambda *one: one[:2] in QUICK, GRID)
)
def test_ends_where_ddp_ends(
    pool_of_device: RankPool, name: str, strategy: str, precision: str, world_size: int
) -> None:
    # Of ranks that share a GPU there are two.
    size = 2 if pool_of_device.device == "cuda" else world_size
    for found in pool_of_device.run(size, compare, name, strategy, precision):
        assert found.from_rank_0 == 0
        assert found.draws == [True] * len(found.draws) and len(found.draws) > 3 * ACCUMULATED
        assert found.apart <= TOLERANCES[precision][name]
        assert found.last_loss < 0.95 * found.first_loss
