"""What hooks call elsewhere: some of it reads gradients, some does not."""

from typing import Any

import torch
from torch import nn

TOOLS: dict[str, Any] = {}


def norms(module: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in module.parameters()]


class Looker:
    """Reads gradients by a method with a name that any container has."""

    def update(self, module: nn.Module) -> None:
        self.seen = norms(module)

    def __getitem__(self, module: nn.Module) -> list[Any]:
        return norms(module)


class Average:
    """What is called EMA."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.device = None
        self.kept: list[Any] = []

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        if not self.kept:
            self.kept = [parameter.detach().clone() for parameter in module.parameters()]
        for average, parameter in zip(self.kept, module.parameters(), strict=True):
            average.lerp_(parameter.to(device=self.device), 1 - self.decay)


class InEpochs:
    """Counts epochs, as timm's schedulers do: Lightning wants `lr_scheduler_step` overridden for such."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def step(self, epoch: int, metric: float | None = None) -> None:
        for group, value in zip(self.optimizer.param_groups, self._values(epoch), strict=True):
            group["lr"] = value

    def _values(self, epoch: int) -> list[float]:
        return [0.1 / (1 + epoch) for _ in self.optimizer.param_groups]


TOOLS["looker"] = Looker()
