"""GPTs of published sizes, the output tied to the embedding, on random tokens: they are timed, not trained.

The decoder is that of ``benchmarks/gpt.py``, whose head is the embedding here.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.gpt import Decoder


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

    def make_decoder(self) -> Decoder:
        """On the device that is torch's default."""
        return Decoder(self.width, self.depth, self.heads, self.length, self.vocabulary, tied=True)


SIZES = {
    "tiny": Size(32, 2, 2, vocabulary=256, length=32, batch=2, short=8),
    "124m": Size(768, 12, 12),
    "1.3b": Size(2048, 24, 16, batch=8),
}


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
