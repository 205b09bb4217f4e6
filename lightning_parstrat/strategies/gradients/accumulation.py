"""Gradients of one big batch: what all strategies do between the micro-batches of a step, and around the step."""

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parstrat.core.accumulation import (
    AccumulationWindow,
    PartialWindow,
    gradient_scale,
    weighted_gradient_scale,
)
from lightning_parstrat.core.policy import ClipScope, GradientPolicy, NonfiniteGradients
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.gradients.loss_weights import LossWeights
from lightning_parstrat.distributed.zero1.reductions import GradientScale
from lightning_parstrat.distributed.zero1.shardability import needs_closure
from lightning_parstrat.strategies.checkpoint.checkpoints import CheckpointingStrategy
from lightning_parstrat.strategies.checkpoint.preemption import (
    SavesWhenPreempted,
    check_job,
    own_job,
    signal_to_requeue_at,
)
from lightning_parstrat.strategies.gradients.clipping import (
    GradientClipper,
    GradientNorm,
    NonfiniteGradientError,
    StepSkipped,
)
from lightning_parstrat.strategies.gradients.precision import WindowHooks, enabled_scaler, equip_precision
from lightning_parstrat.strategies.lightning_compat import unwrapped, warn_of_untried_versions

LOSS_WEIGHT = "loss_weight"


class AccumulationAwareStrategy(CheckpointingStrategy):
    """DDP whose step is exactly that of one big batch, clipped as such.

    Args:
        partial_window: ``"exact"`` takes the mean over the micro-batches that there are where the end of an epoch cuts
            an accumulation window short; ``"lightning"`` divides by ``accumulate_grad_batches`` all the same, as
            stock Lightning does, so that such a step is too small.
        clip_scope: ``"optimizer"`` clips by the norm of the gradients of the optimizer that steps; ``"global"`` by that
            of all optimizers' gradients together.
        norm_type: p of the norm that clips, a positive number or ``inf``.
        nonfinite_grads: What to do when gradients are NaN or infinite on any rank. ``"propagate"`` steps all the same;
            ``"skip"`` leaves parameters, optimizer state and learning rate as they are, on all ranks; ``"raise"`` ends
            the training on all ranks. For both the host has to wait in every step.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    _not_copied = CheckpointingStrategy._not_copied | {
        "_clipper",
        "_loss_hook",
        "_preemption",
        "_restore_precision",
        "_window_scale",
        "_weights",
    }

    def __init__(
        self,
        partial_window: PartialWindow = "exact",
        clip_scope: ClipScope = "optimizer",
        norm_type: float | Literal["inf"] = 2.0,
        nonfinite_grads: NonfiniteGradients = "propagate",
        **kwargs: Any,
    ) -> None:
        self._gradient_policy = GradientPolicy(
            partial_window=partial_window, clip_scope=clip_scope, norm_type=norm_type, nonfinite_grads=nonfinite_grads
        )
        self._window = AccumulationWindow()
        self._weights: LossWeights | None = None
        self._clipper: GradientClipper | None = None
        self._restore_precision: Callable[[], None] | None = None
        self._listeners: list[Callable[[GradientNorm], None]] = []
        self._accumulates = False
        self._loss_weight: Any = None
        self._loss_hook: RemovableHandle | None = None
        self._backward_has_ended = True
        self._window_scale: GradientScale | None = None
        self._skipped_steps = 0
        self._schedulers = HeldSchedulers()
        self._said: set[str] = set()
        self._preemption: SavesWhenPreempted | None = None
        super().__init__(**kwargs)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping, over all ranks: a 0-d tensor, equal on all of them.

        None where nobody has asked for it: clipping by norm does, :class:`~lightning_parstrat.GradNormMonitor` does,
        and so do ``nonfinite_grads="skip"`` and ``"raise"``.
        """
        return None if self._clipper is None or self._clipper.latest is None else self._clipper.latest.norm

    @property
    def skipped_steps(self) -> int:
        """How many steps of this training were left out, the same on all ranks.

        Because gradients were not finite (``nonfinite_grads="skip"``), because the loss scale of 16-mixed was too
        large, or because no micro-batch had any weight. Fused optimizers in 16-mixed leave steps out on the device;
        this waits for it.
        """
        unknown = None if self._clipper is None else self._clipper.skipped_on_device
        return self._skipped_steps + (0 if unknown is None else int(unknown.item()))

    def on_gradient_norm(self, listener: Callable[[GradientNorm], None]) -> None:
        """Calls ``listener`` with the norm of every step of the next training, after the step.

        Call it before every training, in a callback's ``setup``. The norm is measured for that, clipping or not.
        """
        self._listeners.append(listener)

    @override
    def setup_precision_plugin(self) -> None:
        """Lets the precision plugin clip gradients wherever they are.

        Done here rather than when the plugin is set, so that what is pickled for spawned processes is the user's.
        """
        if self._training_module.trainer.state.fn == TrainerFn.FITTING:
            self._begin_training()
        super().setup_precision_plugin()

    def _begin_training(self) -> None:
        warn_of_untried_versions()
        self._end_training()
        control = self._control
        self._window, self._weights = AccumulationWindow(), LossWeights(self._messages)
        self._window_scale, self._skipped_steps = None, 0
        self._said.clear()
        self._clipper = GradientClipper(
            self._gradient_policy, control, lambda: self.optimizers, lambda: self._is_weightless, self._listeners
        )
        if self._gradient_policy.nonfinite_grads == "raise" and enabled_scaler(self.precision_plugin) is not None:
            raise MisconfigurationException(
                "nonfinite_grads='raise' does not go with precision '16-mixed': its loss scale makes gradients"
                " overflow on purpose, to find out how large it may be. Use 'skip', or precision 'bf16-mixed'."
            )
        self._restore_precision = equip_precision(
            self.precision_plugin,
            self._clipper,
            WindowHooks(self._end_backward, self._complete_window, self._note_skipped_step),
        )
        self._prepare_for_signals()

    def _leaves(self) -> Iterable[Tensor]:
        """The tensors that a backward computes gradients for: as a rule all parameters."""
        return self._training_module.parameters()

    def _prepare_for_signals(self) -> None:
        trainer = self._training_module.trainer
        requeue_signal = signal_to_requeue_at(trainer)
        self._preemption = SavesWhenPreempted(
            self._messages, self._resume_points, requeue_signal, self.wait_for_saves, self._give_up
        )
        if requeue_signal is not None:
            self._preemption.listen(requeue_signal)

    @override
    def on_train_start(self) -> None:
        """Looks between batches from now on, and warns of the one way to draw them that loses accumulated gradients."""
        super().on_train_start()
        trainer = self._training_module.trainer
        if self._preemption is not None:
            # Not before: programs count, copy and compare their callbacks where they begin.
            self._remove_callbacks()
            trainer.callbacks.insert(0, self._preemption)
            self._preemption.take_over_sigterm(trainer)
        draws_batches = is_param_in_hook_signature(
            self._training_module.training_step, "dataloader_iter", explicit=True
        )
        if draws_batches and trainer.accumulate_grad_batches > 1:
            self._say_once(
                rank_zero_warn,
                "`training_step(dataloader_iter)` and `accumulate_grad_batches` do not go together: Lightning zeroes"
                " gradients by the index of the batch before. Let `training_step` take a batch.",
            )

    @override
    def on_train_end(self) -> None:
        """Looks between batches no longer."""
        super().on_train_end()
        self._remove_callbacks()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Counts the micro-batches of the window, and lets schedulers go on that had waited for a skipped step."""
        super().on_train_batch_start(batch, batch_idx)
        self._schedulers.release()
        if self._window_scale is not None:
            # Where nobody has stepped since, it must be known before its window is forgotten.
            self._window_scale()
        trainer = self._training_module.trainer
        # The index handed in lags behind where a training step draws batches by itself.
        index = trainer.fit_loop.epoch_loop.batch_idx
        if self._window.begin_batch(index, trainer.accumulate_grad_batches):
            self._begin_window()
        if self._clipper is not None:
            self._clipper.begin_backward()

    def _begin_window(self) -> None:
        self._window_scale = None
        if self._weights is not None:
            self._weights.begin_window()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's training step, and keeps the weight that it gives its loss."""
        output = super().training_step(*args, **kwargs)
        self._loss_weight = output.get(LOSS_WEIGHT) if isinstance(output, Mapping) else None
        if self._loss_weight is not None and not self._training_module.automatic_optimization:
            self._say_once(
                rank_zero_warn,
                "`loss_weight` has no effect in manual optimization, where `training_step` returns after its backward:"
                " multiply the loss by it.",
            )
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Has backward weigh the loss; the last backward of a window leaves the mean over the whole window."""
        factor = self._begin_backward()
        if factor is not None and closure_loss.requires_grad:
            # Its gradient, not the loss itself: that goes on through the user's plugins and hooks as it is.
            weigh = functools.partial(_weighed, factor)
            self._loss_hook = closure_loss.register_hook(weigh)  # type: ignore[no-untyped-call]
        super().pre_backward(closure_loss)
        # Not before: what is raised there is due to an earlier backward.
        self._backward_has_ended = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends the backward, where a precision plugin of the user's has left that out."""
        self._end_backward()
        super().post_backward(closure_loss)

    def _begin_backward(self) -> float | Tensor | None:
        """Takes note of another micro-batch; returns what its loss is to be multiplied by, or None."""
        self._window_scale = None
        if self._clipper is not None:
            self._clipper.begin_backward()
            self._clipper.unscaled.clear()
        if self._weights is None or not self._training_module.automatic_optimization:
            return None
        self._window.run_backward()
        factor = self._weights.add(self._window.micro_batches, self._loss_weight, self._leaves)
        if self._weights.used:
            self._say_once(
                rank_zero_info,
                "`training_step` returns a `loss_weight`: gradients are the mean over all micro-batches and ranks, each"
                " weighed by it.",
            )
        if not self._accumulates:
            self._window_scale = _Once(self._scale_of_window)
        return factor

    def _end_backward(self) -> None:
        """As a rule the precision plugin calls it, before it lets hooks look at gradients."""
        ended, self._backward_has_ended = self._backward_has_ended, True
        if self._loss_hook is not None:
            # The same loss may be run backward again, with another weight.
            self._loss_hook.remove()
            self._loss_hook = None
        if self._weights is not None:
            self._weights.end_backward()
        if not ended and not self._accumulates:
            self._scale_reduced_gradients()

    def _complete_window(self) -> None:
        """Reduces and scales gradients where the last micro-batch of a window had no backward to do it in.

        Alone, a rank may return None from ``training_step``; among others Lightning refuses it.
        """
        waits = self._window.backwards and self._window_scale is None and not self._accumulates
        if waits and self._training_module.automatic_optimization:
            self._window_scale = _Once(self._scale_of_window)
            self._reduce_local_gradients()
            self._scale_reduced_gradients()

    @property
    def _is_weightless(self) -> bool:
        return self._window_scale is not None and self._window_scale() == 0.0

    def _scale_of_window(self) -> float:
        """What makes the window's mean of the sum of its gradients over ranks. Collective where losses have weights."""
        accumulate = self._training_module.trainer.accumulate_grad_batches
        # All ranks must count alike, and draw equally many batches; alone, one knows for how many it was called.
        micro_batches = self._window.backwards if self.world_size == 1 else self._window.micro_batches
        if self._weights is not None and self._weights.used:
            total = self._weights.total()
            return weighted_gradient_scale(
                total_weight=total.weight,
                reference=total.reference,
                accumulate=accumulate,
                micro_batches=micro_batches,
                partial_window=self._gradient_policy.partial_window,
            )
        scale = gradient_scale(
            accumulate=accumulate,
            micro_batches=micro_batches,
            world_size=self.world_size,
            partial_window=self._gradient_policy.partial_window,
        )
        if scale != 1.0 / self.world_size:
            self._say_once(
                rank_zero_info,
                f"a step was made of {counted(micro_batches, 'micro-batch', 'micro-batches')} instead of {accumulate}:"
                f" its gradients are the mean over those it has. Stock Lightning divides by {accumulate}, as"
                " partial_window='lightning' does.",
            )
        return scale

    def _scale_reduced_gradients(self) -> None:
        """Brings what the reduction has left as the mean over ranks to the mean over the window."""

    def _reduce_local_gradients(self) -> None:
        """Sends what backwards have left in ``param.grad``, where it takes more than backward to do so."""

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it, gradients accumulate locally and nothing is sent."""
        before, self._accumulates = self._accumulates, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._accumulates = before

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs what of the closure is left, clips and steps; or leaves the step out, on all ranks."""
        if self.world_size > 1 and needs_closure(unwrapped(optimizer)):
            # It decides by the loss how far to go, and whether to ask again: the same on all ranks.
            closure = functools.partial(self._mean_loss, closure)
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        except StepSkipped:
            if self._gradient_policy.nonfinite_grads == "raise" and not self._is_weightless:
                trainer = self._training_module.trainer
                raise NonfiniteGradientError(
                    f"Gradients are not finite in epoch {trainer.current_epoch}, batch"
                    f" {trainer.fit_loop.epoch_loop.batch_idx}. Parameters and optimizer state are as before this step."
                    " `Trainer(detect_anomaly=True)` names the operation that has made NaN. nonfinite_grads='skip'"
                    " leaves such steps out, 'propagate' does as `ddp`."
                ) from None
            self._note_skipped_step(optimizer)
        return None

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """Evaluates a closure; its loss is the mean over ranks, weighed as their gradients are. Collective."""
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        weighs = self._weights is not None and self._weights.used
        weight = torch.as_tensor(self._loss_weight if weighs else 1.0, dtype=loss.dtype, device=loss.device).reshape(())
        # The mean over nothing but padding is NaN, and counts nothing.
        weighted = torch.where(weight > 0, loss.detach().reshape(()) * weight, 0)
        total_loss, total_weight = self.reduce(torch.stack((weighted, weight)), reduce_op="sum")
        return total_loss / total_weight

    def _note_skipped_step(self, optimizer: Optimizer) -> None:
        self._skipped_steps += 1
        if self._clipper is not None:
            self._clipper.skip_step(optimizer)
        if self._is_weightless:
            rank_zero_warn("All `loss_weight`s of a step were 0: it is skipped.")
        elif self._gradient_policy.nonfinite_grads == "skip":
            rank_zero_warn(f"Gradients were not finite: the step is skipped, as {self._skipped_steps} were by now.")
        if self._is_weightless or self._gradient_policy.nonfinite_grads == "skip":
            self._schedulers.hold(self.lr_scheduler_configs, unwrapped(optimizer))

    @override
    def _own_entries(self) -> dict[str, Any]:
        """In a Slurm job, the job's number."""
        return {**super()._own_entries(), **own_job()}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint, unless it is what another Slurm job saved for itself."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        check_job(self._loaded_entries, checkpoint_path)
        return checkpoint

    @override
    def teardown(self) -> None:
        """Gives the precision plugin back as it was."""
        self._end_training()
        self._listeners.clear()
        super().teardown()

    def _end_training(self) -> None:
        self._schedulers.release()
        if self._restore_precision is not None:
            self._restore_precision()
            self._restore_precision = None
        if self._weights is not None:
            self._weights.end_backward()
            self._weights = None
        if self._preemption is not None:
            self._remove_callbacks()
            self._preemption.stop_listening(self._training_module.trainer)
            self._preemption = None

    def _remove_callbacks(self) -> None:
        # In place: tuners put lists of their own there for a while, and look into them afterwards.
        callbacks = self._training_module.trainer.callbacks
        callbacks[:] = [one for one in callbacks if one is not self._preemption]

    def _say_once(self, say: Callable[[str], None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(f"{self.flag}: {message}")


def _weighed(factor: float | Tensor, gradient: Tensor) -> Tensor:
    # A factor on the device is fp32, and so would its product be with a 0-d gradient of 16 bits.
    return (gradient * factor).to(gradient.dtype)


class _Once:
    """Calls a function once, when first asked; ``functools.cache`` would do the same, with 30 calls to set it up."""

    def __init__(self, ask: GradientScale) -> None:
        self._ask = ask
        self._answer: float | None = None

    def __call__(self) -> float:
        if self._answer is None:
            self._answer = self._ask()
        return self._answer


class HeldSchedulers:
    """Keeps schedulers that go by steps from going on, by the frequency that Lightning steps them with.

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
