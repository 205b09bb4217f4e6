"""Models whose parameters are real and whose computation is none: each is read, and gets a gradient, in its turn.

A factor makes large ones fit: every tensor has 1/factor of its elements, buckets 1/factor of their bytes, and bytes in
the record are multiplied by the factor again. So the launches are those of the full model. What buckets are padded by
is multiplied, too: a few hundredths of the model at 1,024 ranks, where the full model has next to none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset

Notes = Callable[[str, int], None]
"""Takes note of a computation of parameters of so many bytes: :meth:`Recorder.compute`."""


class Shapes(NamedTuple):
    """A model as the sizes of its tensors, in the order in which a forward reads them.

    Attributes:
        name: Said in results.
        elements: Of each tensor.
        dtype: Of all.
        factor: What the sizes that are played are divided by.
    """

    name: str
    elements: tuple[int, ...]
    dtype: torch.dtype
    factor: int = 1

    @property
    def played_elements(self) -> list[int]:
        """The sizes that are played."""
        return [-(-elements // self.factor) for elements in self.elements]

    @property
    def nbytes(self) -> int:
        """Of the full model."""
        return sum(self.elements) * self.dtype.itemsize


def small(tensors: int = 60, elements: int = 4096) -> Shapes:
    """Many tensors of one size: for counting."""
    return Shapes("small", (elements,) * tensors, torch.float32)


def gpt_350m(factor: int = 8) -> Shapes:
    """GPT of 24 layers and width 1,024 in fp32: 292 tensors, the output tied to the embedding."""
    width = 1024
    norm = (width, width)
    attention = (3 * width * width, 3 * width, width * width, width)
    wide = (4 * width * width, 4 * width, 4 * width * width, width)
    layers = (*norm, *attention, *norm, *wide) * 24
    return Shapes("GPT 350M", (50257 * width, 1024 * width, *layers, *norm), torch.float32, factor)


def llama_7b(factor: int = 32) -> Shapes:
    """Llama of 32 layers and width 4,096 in bf16: 291 tensors."""
    width, wide, vocabulary = 4096, 11008, 32000
    layer = (width, *(width * width,) * 4, width, *(width * wide,) * 3)
    return Shapes("Llama 7B", (vocabulary * width, *layer * 32, width, vocabulary * width), torch.bfloat16, factor)


class _Turn(torch.autograd.Function):
    """Notes that a parameter's forward is done, and in backward that its gradient is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, note: Notes, nbytes: int) -> Tensor:
        ctx.note, ctx.nbytes = note, nbytes
        note("forward", nbytes)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.note("backward", ctx.nbytes)
        return gradient, None, None


class PlayedModel(LightningModule):
    """Reads one element of each tensor; autograd makes the rest of its gradient of zeros.

    Args:
        shapes: The tensors.
        note: Is told of every computation.
        registered_backward: Whether tensors are registered in the reverse of the order in which they are read, so that
            the first plan of the buckets is as wrong as can be.
    """

    def __init__(self, shapes: Shapes, note: Notes, registered_backward: bool = False) -> None:
        super().__init__()
        self._note_computation, self._factor = note, shapes.factor
        numbered = list(enumerate(shapes.played_elements))
        made = {number: nn.Parameter(torch.zeros(size)) for number, size in numbered}
        order = reversed(numbered) if registered_backward else numbered
        self.tensors = nn.ParameterDict({f"tensor_{number}": made[number] for number, _ in order})
        self._read = [f"tensor_{number}" for number, _ in numbered]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.zeros((), dtype=self.tensors[self._read[0]].dtype)
        for name in self._read:
            parameter = self.tensors[name]
            # First read, which may have to wait for it, then compute; in backward the other way round.
            hidden = hidden + parameter[0]
            hidden = _Turn.apply(hidden, self._note_computation, parameter.nbytes * self._factor)
        return hidden

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Numbers(Dataset[Tensor]):
    """As many samples as asked for."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)
