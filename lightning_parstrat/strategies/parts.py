"""The parts that a strategy is made of. :class:`ComposedStrategy` calls their few hooks in one order."""

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy


class Part:
    """A part of a strategy. A hook does nothing unless a part overrides it.

    Parts know Lightning's strategy and the methods of parts that they are given. They know no strategy of this package.

    Args:
        strategy: The strategy that it is a part of.
    """

    _of_one_training: ClassVar[frozenset[str]] = frozenset()
    """Attributes that belong to one training and its ranks. Copies have None instead."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out process groups and their users, for programs that copy or pickle a trainer."""
        return {name: None if name in self._of_one_training else value for name, value in vars(self).items()}

    @property
    def _module(self) -> LightningModule:
        return self._strategy.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    def setup_optimizers(self) -> None:
        """Called when ranks have joined, before the optimizers of a training are made. Collective."""

    def begin_fit(self) -> None:
        """Called when the optimizers of a training have been made. Collective."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader, or a stand-in for it, in training and in evaluation. Collective."""
        return dataloader

    def on_train_start(self) -> None:
        """Called before the first batch, after the callbacks' and the module's `on_train_start`. Collective."""

    def on_train_end(self) -> None:
        """Called when training has ended. Collective."""

    def on_evaluation_start(self) -> None:
        """Called when a validation, a test or a prediction begins. Collective."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the training. Not collective."""

    def teardown(self) -> None:
        """Called when the Trainer's call ends, by an exception or without one. Not collective after an exception."""
