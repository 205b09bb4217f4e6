"""A callback that logs gradient norms, the share of clipped steps, and skipped steps."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.strategies.gradients.clipping import GradientNorm
from lightning_parstrat.strategies.lightning_compat import batches_that_stepped, logs_after_this_batch, window_is_open


class GradNormMonitor(Callback):
    """Logs the norms of gradients, and clipped and skipped steps, to every logger each ``log_every_n_steps``.

    - ``grad_norm`` and ``grad_norm_max``: mean and largest norm before clipping, over all ranks and the steps since the
      last log. A norm that is not finite shows. Code that clips without Lightning's ``clip_gradients`` clips before.
    - ``grad_clip_ratio``: the share of steps that clipping by norm made smaller. Logged if clipping by norm is on.
    - ``skipped_steps``: how many steps of the training were skipped. Their norms are not in the above.

    The values are in ``trainer.callback_metrics`` too. Without clipping by norm, the callback costs one pass over the
    gradients and one scalar all-reduce a step. The host waits only for a log.

    Args:
        prefix: The text that the names begin with, such as ``"train/"``.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self._sums: Tensor | None = None
        """Sums of norms, of steps, and of clipped steps since the last log, on the gradients' device."""
        self._largest: Tensor | None = None
        self._clips = False
        self._logged_skipped = 0
        self._strategy: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the strategy for norms.

        Raises:
            MisconfigurationException: The strategy is not one of this package.
        """
        if stage != "fit":
            return
        # Not by class: Lightning takes callbacks of its other package, too, and our strategies there are other classes.
        if not hasattr(trainer.strategy, "on_gradient_norm"):
            raise MisconfigurationException(
                f"GradNormMonitor needs a strategy that knows the norm, and found {type(trainer.strategy).__name__}."
                " Choose `strategy='ddp_tuned'` or 'zero1_custom'."
            )
        self._reset()
        self._strategy, self._logged_skipped = trainer.strategy, 0
        self._strategy.on_gradient_norm(self._update)

    def _update(self, measured: GradientNorm) -> None:
        norm = measured.norm
        # Only the device knows whether a fused optimizer has skipped a step.
        done = torch.ones_like(norm) if measured.skipped is None else 1.0 - measured.skipped
        clipped = torch.zeros_like(norm) if measured.coefficient is None else measured.coefficient < 1.0
        sums = torch.where(done > 0, torch.stack([norm, torch.ones_like(norm), clipped.to(norm.dtype)]), 0.0)
        largest = torch.where(done > 0, norm, -torch.inf)
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._clips |= measured.coefficient is not None

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Logs when the trainer does: after a step, not after each micro-batch."""
        accumulates = trainer.lightning_module.automatic_optimization and window_is_open(trainer)
        if logs_after_this_batch(trainer) and not accumulates:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the norms of the last steps."""
        skipped = 0 if self._strategy is None else self._strategy.skipped_steps
        if self._sums is not None or skipped != self._logged_skipped:
            self._log(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops the reference to the strategy."""
        self._strategy = None

    def _log(self, trainer: Trainer) -> None:
        if self._strategy is None:
            return
        self._logged_skipped = self._strategy.skipped_steps
        found: dict[str, Tensor] = {"skipped_steps": torch.tensor(float(self._logged_skipped))}
        norms, steps, clipped = (0.0, 0.0, 0.0) if self._sums is None else self._sums.tolist()
        if steps > 0 and self._largest is not None:
            found |= {"grad_norm": torch.tensor(norms / steps), "grad_norm_max": self._largest}
            if self._clips:
                found["grad_clip_ratio"] = torch.tensor(clipped / steps)
        named = {f"{self.prefix}{name}": value.detach().cpu() for name, value in found.items()}
        trainer.callback_metrics.update(named)
        for logger in trainer.loggers:
            logger.log_metrics(
                {name: value.item() for name, value in named.items()}, step=batches_that_stepped(trainer)
            )
        self._reset()

    def _reset(self) -> None:
        self._sums, self._largest, self._clips = None, None, False
