"""An emulated accelerator: the decoder's own parameters and gradients, but layers sleep instead of computing.

A process that sleeps leaves its core to communication, as one does whose accelerator computes. So a step shows what can
be hidden behind computation, apart from what communication costs the core; what is sent is as large as ever.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

# A parameter group smaller than this share of its unit joins its neighbour: a sleep is not exact below 0.1 ms.
_SMALLEST_SHARE = 0.05


class Sleep(torch.autograd.Function):
    """Takes ``seconds`` forward and twice that backward, and has gradients of zeros for ``parameters``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float, *parameters: Tensor) -> Tensor:
        ctx.seconds = seconds
        # Not saved for backward: a strategy may move the parameters in between, and backward needs no values.
        ctx.like = [(parameter.shape, parameter.dtype) for parameter in parameters]
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return gradient, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.like)


class _Unit(nn.Module):
    """Has a module's parameters, and sleeps in its stead."""

    def __init__(self, module: nn.Module, seconds_per_parameter: float) -> None:
        super().__init__()
        self.module = module
        self.seconds_per_parameter = seconds_per_parameter
        self.owners = _groups(module)

    def forward(self, hidden: Tensor) -> Tensor:
        for owners in self.owners:
            # Read anew in every step, as layers do: that is when a strategy has a parameter arrive.
            parameters = [parameter for owner in owners for parameter in owner.parameters(recurse=False)]
            seconds = self.seconds_per_parameter * sum(parameter.numel() for parameter in parameters)
            hidden = Sleep.apply(hidden, seconds, *parameters)
        return hidden


def _groups(module: nn.Module) -> list[list[nn.Module]]:
    """Submodules that hold parameters, in order; small ones with the one before them."""
    total = sum(parameter.numel() for parameter in module.parameters())
    groups: list[list[nn.Module]] = []
    for owner in module.modules():
        size = sum(parameter.numel() for parameter in owner.parameters(recurse=False))
        if size >= _SMALLEST_SHARE * total or (size and not groups):
            groups.append([owner])
        elif size:
            groups[-1].append(owner)
    return groups


class EmulatedDecoder(nn.Module):
    """A decoder whose forward takes ``seconds``, and its backward twice that, spread by parameter count.

    Args:
        decoder: Whose parameters it has.
        seconds: What one forward takes.
    """

    def __init__(self, decoder: Any, seconds: float) -> None:
        super().__init__()
        embeddings = nn.ModuleList([decoder.tokens, decoder.positions])
        modules = [embeddings, *decoder.blocks.layers, decoder.blocks.norm, decoder.head]
        share = seconds / sum(parameter.numel() for parameter in decoder.parameters())
        self.emulated = nn.ModuleList(_Unit(module, share) for module in modules)

    def units(self) -> list[nn.Module]:
        """See :meth:`gpt.Decoder.units`."""
        return list(self.emulated)

    def forward(self, batch: Tensor) -> Tensor:
        """A loss that depends on every parameter, by name."""
        hidden = torch.zeros(1)
        for unit in self.emulated:
            hidden = unit(hidden)
        return hidden.sum()
