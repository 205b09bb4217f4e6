"""A callback that logs gradient norms, how often they were clipped, and skipped steps."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric
from typing_extensions import override

from lightning_parstrat.strategies.accumulation import AccumulationAwareStrategy
from lightning_parstrat.strategies.clipping import GradientNorm


class GradNormMonitor(Callback):
    """Logs to every logger, each ``log_every_n_steps``, what became of the gradients since it last did.

    - ``grad_norm`` and ``grad_norm_max``: mean and largest norm before clipping, over all ranks; a norm that is not
      finite shows.
    - ``grad_clip_ratio``: the share of steps that clipping by norm made smaller; where it is switched on.
    - ``skipped_steps``: how many steps of the training were left out; their norms are not in the above.

    They are in ``trainer.callback_metrics`` too. The norm is measured for it where clipping by norm does not already:
    one pass over the gradients and one scalar all-reduce a step. Nothing waits on the host but when it logs.

    Args:
        prefix: What the names begin with, such as ``"train/"``.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        # All ranks know the norm of the whole.
        self._mean = MeanMetric(nan_strategy="disable", sync_on_compute=False)
        self._largest = MaxMetric(nan_strategy="disable", sync_on_compute=False)
        self._clipped = MeanMetric(nan_strategy="disable", sync_on_compute=False)
        self._steps = 0
        self._strategy: AccumulationAwareStrategy | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the strategy for norms.

        Raises:
            MisconfigurationException: The strategy is none of this package.
        """
        if stage != "fit" or self._strategy is trainer.strategy:
            return
        if not isinstance(trainer.strategy, AccumulationAwareStrategy):
            raise MisconfigurationException(
                f"GradNormMonitor needs a strategy that knows the norm, and found {type(trainer.strategy).__name__}."
                " Choose `strategy='ddp_tuned'` or 'zero1_custom'."
            )
        self._strategy = trainer.strategy
        self._strategy.on_gradient_norm(self._update)

    def _update(self, measured: GradientNorm) -> None:
        device = measured.norm.device
        if self._mean.device != device:
            for metric in (self._mean, self._largest, self._clipped):
                metric.to(device)
        self._steps += 1
        self._mean.update(measured.norm)
        self._largest.update(measured.norm)
        if measured.coefficient is not None:
            self._clipped.update((measured.coefficient < 1.0).float())

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Logs when the trainer does."""
        if trainer._logger_connector.should_update_logs:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs what the last steps have left."""
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if self._strategy is None:
            return
        found: dict[str, Tensor] = {"skipped_steps": torch.tensor(float(self._strategy.skipped_steps))}
        if self._steps:
            found |= {"grad_norm": self._mean.compute(), "grad_norm_max": self._largest.compute()}
        if self._clipped.update_called:
            found["grad_clip_ratio"] = self._clipped.compute()
        named = {f"{self.prefix}{name}": value.detach().cpu() for name, value in found.items()}
        trainer.callback_metrics.update(named)
        for logger in trainer.loggers:
            logger.log_metrics(
                {name: value.item() for name, value in named.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )
        self._steps = 0
        for metric in (self._mean, self._largest, self._clipped):
            metric.reset()
