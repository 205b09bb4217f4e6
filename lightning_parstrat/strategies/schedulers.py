"""Learning rate schedulers that wait where the step was skipped that they would have followed."""

import sys
from collections.abc import Iterable

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer


class HeldSchedulers:
    """Keeps schedulers that go by steps from going on, by how often Lightning is told to step them.

    Lightning asks after every batch, and for those that watch a metric once more after a validation: they are held
    until the next batch begins.
    """

    def __init__(self) -> None:
        self._held: list[tuple[LRSchedulerConfig, int]] = []

    def hold(self, configs: Iterable[LRSchedulerConfig], optimizer: Optimizer) -> None:
        """Holds those of ``optimizer`` that go by steps; those that go by epochs go on."""
        for config in configs:
            if config.interval == "step" and getattr(config.scheduler, "optimizer", None) is optimizer:
                self._held.append((config, config.frequency))
                config.frequency = sys.maxsize

    def release(self) -> None:
        """Lets them go on as before."""
        while self._held:
            config, config.frequency = self._held.pop()
