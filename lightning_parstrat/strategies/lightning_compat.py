"""What of Lightning is private, and used all the same: each name with what it is for."""

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within Lightning's wrapper, which has its name and its attributes."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
