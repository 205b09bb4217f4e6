"""The states of this process's random number generators."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """The states of this process's random number generators, as tensors and plain values: some 10 KB."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "python": (version, _as_tensor(numbers), gauss),
        "numpy": (str(kind), _as_tensor(keys), position, has_gauss, cached),
        # A query would initialize CUDA, and afterwards this process could not be forked.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets this process's random number generators."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(_as_array(numbers).tolist()), gauss))
    kind, keys, *others = state["numpy"]
    np.random.set_state((kind, _as_array(keys), *others))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _as_tensor(numbers: Any) -> Tensor:
    # `weights_only` loading takes no arrays. One tensor and not hundreds of numbers, because a checkpoint has those of
    # all ranks, and code walks through it. Of int32, because torch can hardly compute with uint32.
    return torch.from_numpy(np.asarray(numbers, dtype=np.uint32).view(np.int32).copy())


def _as_array(numbers: Tensor) -> Any:
    return numbers.numpy().view(np.uint32)
