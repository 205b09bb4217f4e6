"""What a strategy is made of: parts with the same few hooks, which :class:`ComposedStrategy` calls in one order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy


class Part:
    """A part of a strategy. A hook does nothing unless a part overrides it.

    Parts know Lightning's strategy and the methods of parts that they are given. They know no strategy of this package.

    Args:
        strategy: The strategy it is a part of.
    """

    _of_one_training: ClassVar[frozenset[str]] = frozenset()
    """Attributes that belong to one training and its ranks, and are None outside of it: they are not copied."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    def __getstate__(self) -> dict[str, Any]:
        """For programs that copy or pickle a trainer: process groups, and what knows them, stay where they are."""
        return {name: None if name in self._of_one_training else value for name, value in vars(self).items()}

    @property
    def _module(self) -> LightningModule:
        module: LightningModule | None = self._strategy.lightning_module
        if module is None:
            raise AssertionError("the strategy was used before a module was connected to it")
        return module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    def setup_optimizers(self) -> None:
        """Ranks have joined, and the optimizers of a training are about to be made. Collective."""

    def begin_fit(self) -> None:
        """The optimizers of a training have been made. Collective."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns what stands for a loader, of training as of evaluation. Collective."""
        return dataloader

    def on_train_start(self) -> None:
        """Training is about to begin; callbacks and the module have been told. Collective."""

    def on_validation_end(self) -> None:
        """A validation has ended. Collective."""

    def on_train_end(self) -> None:
        """Training has ended. Collective."""

    def on_exception(self, exception: BaseException) -> None:
        """An exception ends the training. Not collective."""

    def teardown(self) -> None:
        """The Trainer's call has ended, by an exception or without one. Not collective after an exception."""

    def entries(self) -> dict[str, Any]:
        """What the part keeps in a checkpoint, the same on all ranks."""
        return {}

    def check_entries(self, entries: Mapping[str, Any], path: str | Path) -> None:
        """Refuses a checkpoint by the entries that were kept in it.

        Raises:
            MisconfigurationException: Training cannot resume from it.
        """
