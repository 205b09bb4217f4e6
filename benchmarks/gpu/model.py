"""GPTs of published sizes, the output tied to the embedding, on random tokens: they are timed, not trained.

``benchmarks/gpt.py`` has a smaller one, whose attention holds a mask and whose results were measured on CPUs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Size(NamedTuple):
    """A model and what a rank computes of it in a step.

    Attributes:
        width: Of the hidden state.
        depth: How many layers.
        heads: Of attention.
        vocabulary: How many tokens there are.
        length: Tokens in a sequence.
        batch: Sequences of a rank in a step.
        short: Tokens of the one sequence that is computed where only the host is measured.
    """

    width: int
    depth: int
    heads: int
    vocabulary: int = 50304
    length: int = 1024
    batch: int = 16
    short: int = 16


SIZES = {
    "tiny": Size(32, 2, 2, vocabulary=256, length=32, batch=2, short=8),
    "124m": Size(768, 12, 12),
    "1.3b": Size(2048, 24, 16, batch=8),
}


class Block(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widening, self.narrowing = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.queries_keys_values(self.first_norm(hidden)).chunk(3, dim=-1)
        by_head = [part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrowing(F.gelu(self.widening(self.second_norm(hidden))))


class Decoder(nn.Module):
    """Returns the mean loss of a batch of sequences, each of one token more than the model sees."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


class Batches(Dataset[Tensor]):
    """Batches that lie on the device already: what is measured is the step, not how they come there.

    Args:
        size: Their shape.
        number: How many an epoch has.
        device: Where they are.
        short: Whether they are one short sequence each, so that a device has next to nothing to compute.
    """

    _KEPT = 4

    def __init__(self, size: Size, number: int, device: torch.device, short: bool) -> None:
        shape = (1, size.short + 1) if short else (size.batch, size.length + 1)
        self._number = number
        self._batches = [torch.randint(size.vocabulary, shape, device=device) for _ in range(self._KEPT)]

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index % self._KEPT]
