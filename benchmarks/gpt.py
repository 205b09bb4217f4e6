"""A GPT of adjustable size on random tokens: it is timed, not trained."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 128
VOCABULARY = 8192


class RandomTokens(Dataset):
    """Sequences of one more token than the model sees."""

    def __init__(self, samples: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Decoder(nn.Module):
    """Pre-norm transformer decoder; 33.7 million parameters by default, of which two embeddings are a quarter."""

    def __init__(
        self,
        width: int = 512,
        depth: int = 8,
        heads: int = 8,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def units(self) -> list[nn.Module]:
        """The modules that compute one after the other, each of which a strategy may shard by itself."""
        return [self.tokens, *self.blocks.layers, self.head]

    def forward(self, batch: Tensor) -> Tensor:
        """The mean loss."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        length = inputs.shape[1]
        hidden = self.tokens(inputs) + self.positions.weight[:length]
        logits = self.head(self.blocks(hidden, mask=self.mask[:length, :length], is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
