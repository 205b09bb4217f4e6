"""Small modules of different kinds. None of them knows of the package under test."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

FEATURES = 12
OptimizerFactory = Callable[[Iterable[Any]], Any]


class Samples(Dataset):
    """Inputs that differ from index to index, so that a wrong sampler shows."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)
        self.data = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Stream(IterableDataset):
    """Of unknown length."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


# A larger epsilon keeps the first steps from amplifying rounding in tiny gradients.
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1)


class Zoo(LightningModule):
    """Base: automatic optimization of ``compute_loss`` with the given optimizer."""

    def __init__(self, make_optimizer: OptimizerFactory = adamw) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def compute_loss(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.compute_loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.compute_loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.sum(1)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class MLP(Zoo):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - batch.mean(1, keepdim=True)).pow(2).mean()


class Convolutional(Zoo):
    """channels_last weights and several ranks of tensors."""

    def build(self) -> None:
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4 * 1 * 2, 3)

    def compute_loss(self, batch: Tensor) -> Tensor:
        images = batch.view(-1, 1, 3, 4)
        hidden = F.gelu(self.deep(F.gelu(self.conv(images))))
        return self.head(hidden.flatten(1)).pow(2).mean()


class TiedLanguageModel(Zoo):
    def build(self) -> None:
        self.embedding = nn.Embedding(19, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embedding.weight

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 10).long() % 19
        logits = self.head(torch.tanh(self.mix(self.embedding(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Attention(Zoo):
    """nn.MultiheadAttention reads its output projection without calling it."""

    def build(self) -> None:
        self.project = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def compute_loss(self, batch: Tensor) -> Tensor:
        tokens = self.project(batch.view(-1, 4, 3))
        attended, _ = self.attention(tokens, tokens, tokens)
        return (self.norm(tokens + attended).mean(1) - 0.3).pow(2).mean() + tokens.pow(2).mean()


class Recurrent(Zoo):
    def build(self) -> None:
        self.lstm = nn.LSTM(3, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        outputs, _ = self.lstm(batch.view(-1, 4, 3))
        return self.head(outputs[:, -1]).pow(2).mean()


class Unused(Zoo):
    """One layer is never used, one only in every other step."""

    def build(self) -> None:
        self.used = nn.Linear(FEATURES, 5)
        self.never = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.steps = 0

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.steps += self.training
        hidden = torch.tanh(self.used(batch))
        if self.steps % 2:
            hidden = hidden + self.sometimes(hidden)
        return hidden.pow(2).mean()


class UnusedBySomeRanks(Zoo):
    """Which layer is used depends on the data, and so on the rank."""

    def build(self) -> None:
        self.trunk = nn.Linear(FEATURES, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        expert = self.experts[int(batch[0, 0].abs() * 100) % 3]
        return expert(torch.tanh(self.trunk(batch))).pow(2).mean()


class Distilled(Zoo):
    """Learns from a frozen teacher, which the optimizer does not have."""

    def build(self) -> None:
        self.student = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 5))
        self.teacher = nn.Linear(FEATURES, 5).requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            expected = self.teacher(batch).softmax(-1)
        return F.cross_entropy(self.student(batch), expected)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.student.parameters())


class Frozen(Zoo):
    """Half the parameters do not train, and the optimizer has them all the same; unfrozen in the third step."""

    def build(self) -> None:
        self.backbone = nn.Linear(FEATURES, 9).requires_grad_(False)
        self.head = nn.Linear(9, 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step >= 2:
            self.backbone.requires_grad_(True)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(batch))).pow(2).mean()


class BareParameters(Zoo):
    """0-d, empty and bare parameters on the root; parameter groups with their own settings; fewer than ranks."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.linspace(-1, 1, FEATURES))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.scale * (batch * self.weight).sum(1) - 1).pow(2).mean() + self.empty.sum()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(
            [{"params": [self.scale, self.empty], "lr": 0.03}, {"params": [self.weight], "weight_decay": 0.0}]
        )


class ScheduledTransformer(Zoo):
    """A scheduler that was made before the strategy sees the optimizer, and steps with every batch; a logit scale."""

    def build(self) -> None:
        self.project = nn.Linear(3, 8)
        self.scale = nn.Parameter(torch.tensor(0.9))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.scale * self.encoder(self.project(batch.view(-1, 4, 3))) - 0.1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Complex(Zoo):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.randn(FEATURES, 5, dtype=torch.complex64) / 3)
        self.head = nn.Linear(5, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.head((batch.to(self.weight.dtype) @ self.weight).abs()).pow(2).mean()


class BatchNormalised(Zoo):
    """Buffers: their values differ between ranks until rank 0's are broadcast."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1).pow(2).mean()


class StepsByHand(Zoo):
    """Mixin: after one backward all optimizers are stepped by hand, and zeroed."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        made = self.optimizers()
        optimizers = made if isinstance(made, list) else [made]
        loss = self.compute_loss(batch)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss.detach()


class Adversarial(Zoo):
    """A GAN by manual optimization, without any flag for unused parameters."""

    automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for_generator, for_discriminator = self.optimizers()
        noise = batch[:, :4]
        self.toggle_optimizer(for_generator)
        generator_loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_discriminator)
        fake = self.generator(noise).detach()
        discriminator_loss = F.softplus(-self.discriminator(batch)).mean() + F.softplus(self.discriminator(fake)).mean()
        for_discriminator.zero_grad()
        self.manual_backward(discriminator_loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        return discriminator_loss.detach()

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.discriminator(batch).mean()

    def configure_optimizers(self) -> Any:
        return [
            self.make_optimizer(self.generator.parameters()),
            self.make_optimizer(self.discriminator.parameters()),
        ]


def loader(
    length: int, batch_size: int, dtype: torch.dtype = torch.float32, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """In order, every ``world_size``-th sample: the ranks' batches together are one batch of a single process."""
    samples = Samples(length, dtype)
    sampler = DistributedSampler(samples, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(samples, batch_size=batch_size, sampler=sampler)
