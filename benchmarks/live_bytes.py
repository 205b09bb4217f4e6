"""Counts the bytes of the memory that tensors lie in, at every operator: exact, and the same on a busy machine."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Within it, every memory is known that an operator has returned a tensor of.

    What C++ code keeps to itself, such as Gloo's buffers, is not counted. Slow: for a run of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages = WeakIdKeyDictionary()
        self.peak = 0

    @property
    def now(self) -> int:
        """What is alive."""
        return sum(storage.nbytes() for storage in list(self._storages))

    def forget_peak(self) -> None:
        """Lets the peak begin with what is alive now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor):
                held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._storages[held.untyped_storage()] = True
        # At every operator: memory also comes and goes without one, as FSDP2's parameters do.
        self.peak = max(self.peak, self.now)
        return returned
