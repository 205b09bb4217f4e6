"""The states of this process's random number generators, and how a resumed training restores them."""

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_parstrat.core.wording import counted
from lightning_parstrat.strategies.lightning_compat import ends_epoch_first

RNG = "rng"
"""The key of the states of random number generators, among this package's entries of a checkpoint."""


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


@contextmanager
def rng_preserved() -> Generator[None, None, None]:
    """Within it, random draws are temporary: afterwards the generators draw the same numbers again."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _as_tensor(numbers: Any) -> Tensor:
    # `weights_only` loading takes no arrays. One tensor and not hundreds of numbers, because a checkpoint has those of
    # all ranks, and code walks through it. Of int32, because torch can hardly compute with uint32.
    return torch.from_numpy(np.asarray(numbers, dtype=np.uint32).view(np.int32).copy())


def _as_array(numbers: Tensor) -> Any:
    return numbers.numpy().view(np.uint32)


class RandomNumbers:
    """Restores the random number generators of all ranks.

    Lightning does not: after a resume, dropout and shuffling would repeat their draws from the training's begin.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def load(self, saved: Mapping[str, Any] | None, rank: int, world_size: int) -> None:
        """Takes over this rank's state. See :meth:`before_loaders` and :meth:`before_training`."""
        self._loaded = None
        if saved is None:
            return
        if len(saved["states"]) != world_size:
            rank_zero_info(
                f"The checkpoint has the random number generators of {counted(len(saved['states']), 'rank')}, and this"
                f" training has {counted(world_size, 'rank')}: random numbers are not restored."
            )
            return
        self._loaded = {"state": saved["states"][rank], "within_epoch": saved["within_epoch"]}

    def before_loaders(self) -> None:
        """Sets the generators, because a new epoch draws its shuffling from them."""
        if self._loaded is not None:
            set_rng_state(self._loaded["state"])

    def before_training(self, trainer: Trainer) -> None:
        """Sets the generators again, if loaders had drawn before the save, or will draw again for this epoch."""
        loaded = self._loaded
        if loaded is not None and (loaded["within_epoch"] or ends_epoch_first(trainer)):
            set_rng_state(loaded["state"])
