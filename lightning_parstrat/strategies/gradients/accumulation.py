"""Gradients of one big batch: the work of all strategies between the micro-batches of a step, and around the step."""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parstrat.core.accumulation import AccumulationWindow, gradient_scale
from lightning_parstrat.core.policy import CommonPolicy
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.reducer import GradientScale
from lightning_parstrat.distributed.engine.stepping import needs_closure
from lightning_parstrat.distributed.gradients.clipping import NonfiniteGradientError, StepGradients
from lightning_parstrat.distributed.gradients.loss_weights import (
    WEIGHT_CAME_LATE,
    LossWeights,
    Watch,
)
from lightning_parstrat.strategies.gradients.clipping import (
    GradientClipper,
    GradientNorm,
    StepSkipped,
)
from lightning_parstrat.strategies.gradients.precision import equip_precision
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import unwrapped, warn_of_untried_versions
from lightning_parstrat.strategies.parts import Part

LOSS_WEIGHT = "loss_weight"


class GradientHooks(NamedTuple):
    """A strategy's functions, which its accumulation calls.

    Attributes:
        watch: Passes the gradients of the next backward to a function, until what it returns is called.
        gradients: Finds the gradients that optimizers are about to step with.
        end_backward: Called once after every backward, with whether its gradients are those of a whole window, and
            with True. With False if a window's last micro-batch had no backward, which would have sent its gradients.
        before_step: Called between the closure and the optimizer's step.
        say: Logs a line once, with whether it is a warning.
    """

    watch: Watch
    gradients: Callable[[Sequence[Optimizer]], StepGradients]
    end_backward: Callable[[bool, bool], None]
    before_step: Callable[[], None]
    say: Callable[[str, bool], None]


class Accumulation(Part):
    """Makes a step equal to a step on one big batch, also in clipping.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        policy: Says what a step is the mean of, and when it is skipped.
        hooks: The strategy's functions for gradients.
    """

    _of_one_training = frozenset({"_clipper", "_loss_hook", "_restore_precision", "_weights", "scale"})

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, policy: CommonPolicy, hooks: GradientHooks) -> None:
        super().__init__(strategy)
        self._ranks, self._policy, self._hooks = ranks, policy, hooks
        self.accumulates = False
        """Whether the next backward is not the last of its window."""
        self.scale: GradientScale | None = None
        """The factor from the sum over ranks to the window's mean, once its last backward has begun. Collective."""
        self._window = AccumulationWindow()
        self._weights: LossWeights | None = None
        self._clipper: GradientClipper | None = None
        self._restore_precision: Callable[[], None] | None = None
        self._listeners: list[Callable[[GradientNorm], None]] = []
        self._has_backward = False
        """Whether a micro-batch of this window had a backward."""
        self._adds_to_earlier = False
        """Whether the window began with gradients of earlier steps."""
        self._loss_weight: Any = None
        self._by_samples: bool | None = None
        """Whether losses count by their samples. None before the first step, and without a division of samples."""
        self._loss_hook: RemovableHandle | None = None
        self._skipped_steps = 0

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping. None if it was not measured."""
        return None if self._clipper is None or self._clipper.latest is None else self._clipper.latest.norm

    @property
    def skipped_steps(self) -> int:
        """How many steps of this training were skipped. It waits for a device that decides about skips."""
        unknown = None if self._clipper is None else self._clipper.skipped_on_device
        return self._skipped_steps + (0 if unknown is None else int(unknown.item()))

    def on_gradient_norm(self, listener: Callable[[GradientNorm], None]) -> None:
        """Calls ``listener`` with the norm of every step of the next training."""
        self._listeners.append(listener)

    @override
    def begin_fit(self) -> None:
        """Lets the precision plugin clip gradients, in shards or on every rank. Collective."""
        warn_of_untried_versions()
        self._end_fit()
        self._window, self._weights = AccumulationWindow(), LossWeights(self._ranks.messages)
        self.scale, self._skipped_steps, self._by_samples = None, 0, None
        strategy = self._strategy
        self._clipper = GradientClipper(
            self._policy,
            self._ranks.messages.control,
            lambda: strategy.optimizers,
            lambda: self._is_weightless,
            self._listeners,
            self._hooks.gradients,
        )
        self._restore_precision = equip_precision(strategy.precision_plugin, self._clipper, self._end_backward)

    def begin_batch(self) -> None:
        """Counts the micro-batches of the window."""
        if self.scale is not None:
            # If no optimizer has stepped since, the scale must be computed before its window is forgotten.
            self.scale()
        trainer = self._strategy.lightning_module.trainer
        # If a training step draws batches itself, the index in the arguments lags behind.
        index = trainer.fit_loop.epoch_loop.batch_idx
        if self._window.begin_batch(index, trainer.accumulate_grad_batches):
            self.scale, self._has_backward = None, False
            if self._weights is not None:
                self._weights.begin_window()

    def note_output(self, output: STEP_OUTPUT, samples: int | None = None) -> None:
        """Keeps the weight that a training step returns for its loss.

        Args:
            output: What it returned.
            samples: The weight in a training that returns none. Collective in the first step then.
        """
        self._loss_weight = output.get(LOSS_WEIGHT) if isinstance(output, Mapping) else None
        is_given = self._loss_weight is not None
        if samples is not None:
            if self._by_samples is None:
                self._by_samples = not any_rank(is_given, self._ranks.control)
            if self._by_samples and is_given and self._weights is not None:
                self._weights.note_fault(WEIGHT_CAME_LATE)
            # A rank without samples repeats one, which counts nothing.
            self._loss_weight = samples if self._by_samples or samples == 0 else self._loss_weight
        elif is_given and not self._module.automatic_optimization:
            self._hooks.say(
                "`loss_weight` has no effect in manual optimization: `training_step` returns after its backward:"
                " multiply the loss by it.",
                True,
            )

    def begin_backward(self, loss: Tensor) -> None:
        """Makes backward weigh the loss. The last backward of a window leaves the mean over the whole window."""
        # The program may have caught an exception in the last backward.
        self._remove_loss_hook()
        factor = self._factor_of_loss()
        if factor is not None and loss.requires_grad:
            # Its gradient is weighed, not the loss: plugins and hooks of the user get the loss unchanged.
            weigh = functools.partial(_weighed, factor)
            self._loss_hook = loss.register_hook(weigh)

    def _factor_of_loss(self) -> float | Tensor | None:
        """Counts another micro-batch. Returns the factor of its loss, or None."""
        self.scale = None
        if self._clipper is not None:
            self._clipper.begin_backward()
        if self._weights is None or not self._strategy.lightning_module.automatic_optimization:
            return None
        if not self._has_backward:
            # Of parameters that no optimizer has, gradients are never zeroed, and change nothing.
            groups = [group for one in self._strategy.optimizers if self._may_scale for group in one.param_groups]
            earlier = [one.grad for group in groups for one in group["params"] if one.grad is not None]
            self._adds_to_earlier = bool(earlier) and bool(sum(local(one).any() for one in earlier))
        self._has_backward = True
        factor = self._weights.add(self._window.micro_batches, self._loss_weight, self._hooks.watch)
        if self._weights.used and not self._by_samples:
            self._hooks.say(
                "`training_step` returns a `loss_weight`: gradients are the mean over all micro-batches and ranks, each"
                " weighed by it.",
                False,
            )
        if not self.accumulates:
            self.scale = functools.cache(self._scale_of_window)
        return factor

    def _remove_loss_hook(self) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()
            self._loss_hook = None

    def _end_backward(self) -> None:
        # The program may run backward on the same loss again, with another weight.
        self._remove_loss_hook()
        if self._weights is not None:
            self._weights.end_backward()
        self._hooks.end_backward(not self.accumulates, True)

    def _complete_window(self, closure: Callable[[], Any]) -> Any:
        """Calls a closure. Reduces and scales gradients if the last micro-batch of a window had no backward.

        Only a training with one rank may return None from ``training_step``. With more, Lightning refuses it.
        """
        loss = closure()
        waits = self.scale is None and not self.accumulates and self._has_backward
        if waits and self._module.automatic_optimization:
            self.scale = functools.cache(self._scale_of_window)
            self._hooks.end_backward(True, False)
        self._hooks.before_step()
        return loss

    @property
    def _may_scale(self) -> bool:
        """Whether the window's mean may be another one than that over ranks."""
        accumulate = self._strategy.lightning_module.trainer.accumulate_grad_batches
        may_be_short = accumulate > 1 and self._policy.partial_window == "exact"
        return may_be_short or (self._weights is not None and self._weights.used)

    @property
    def _is_weightless(self) -> bool:
        return self.scale is not None and self.scale() == 0.0

    def _scale_of_window(self) -> float:
        """The factor from the sum over ranks to the window's mean. Collective if losses have weights."""
        accumulate = self._strategy.lightning_module.trainer.accumulate_grad_batches
        weights = self._weights if self._weights is not None and self._weights.used else None
        # All ranks draw equally many batches, and count alike.
        micro_batches = self._window.micro_batches
        scale = gradient_scale(
            accumulate=accumulate,
            micro_batches=micro_batches,
            total=micro_batches * self._ranks.ranks_of_step if weights is None else weights.total(),
            partial_window=self._policy.partial_window,
        )
        if self._adds_to_earlier and scale != 1.0 / self._ranks.ranks_of_step:
            raise RuntimeError(
                "Gradients of an earlier step were not zeroed, and the factor of this step's mean would multiply them,"
                " too. Zero gradients before each step. Or leave out `loss_weight`, and set"
                " partial_window='lightning'."
            )
        if weights is None and scale != 1.0 / self._ranks.ranks_of_step:
            self._hooks.say(
                f"a step was made of {counted(micro_batches, 'micro-batch', 'micro-batches')} instead of {accumulate}:"
                f" its gradients are the mean over those it has. Stock Lightning divides by {accumulate}, as"
                " partial_window='lightning' does.",
                False,
            )
        return scale

    @property
    def factor_of_mean(self) -> float:
        """The factor from the mean over ranks to the window's mean. Collective if losses have weights."""
        # Exactly 1 if no factor is needed. A product could round to another number.
        is_mean = self.scale is None or self.scale() == 1.0 / self._ranks.ranks_of_step
        return 1.0 if self.scale is None or is_mean else self.scale() * self._ranks.ranks_of_step

    @contextmanager
    def block(self) -> Generator[None, None, None]:
        """Within it, backwards are not the last of their window."""
        before, self.accumulates = self.accumulates, True
        try:
            yield
        finally:
            self.accumulates = before

    def step(
        self, by_lightning: Callable[..., Any], optimizer: Optimizer, closure: Any, *args: Any, **given: Any
    ) -> Any:
        """Runs the rest of the closure, clips and steps. Or skips the step on all ranks.

        Args:
            by_lightning: Steps as Lightning's strategy does, with the arguments that follow.
            optimizer: The optimizer that steps.
            closure: Computes the loss.
            *args: Passed to ``by_lightning``.
            **given: Passed to ``by_lightning``.
        """
        if self._ranks.world_size > 1 and needs_closure(type(unwrapped(optimizer))):
            # By the loss, the optimizer decides how far to step, and whether to call again. All ranks need the same.
            closure = functools.partial(self._mean_loss, closure)
        try:
            return by_lightning(optimizer, functools.partial(self._complete_window, closure), *args, **given)
        except StepSkipped:
            if self._policy.nonfinite_grads == "raise" and not self._is_weightless:
                trainer = self._trainer
                raise NonfiniteGradientError(
                    f"Gradients are not finite in epoch {trainer.current_epoch}, batch"
                    f" {trainer.fit_loop.epoch_loop.batch_idx}. Parameters and optimizer state are as before this step."
                    " `Trainer(detect_anomaly=True)` names the operation that has made NaN. nonfinite_grads='skip'"
                    " leaves such steps out, which 16-mixed needs to find its loss scale. 'propagate' does as `ddp`."
                ) from None
            self._note_skipped_step(optimizer)
        return None

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """Calls a closure. Its loss becomes the mean over ranks, weighed as their gradients are. Collective."""
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        weighs = self._weights is not None and self._weights.used
        weight = torch.as_tensor(self._loss_weight if weighs else 1.0, dtype=loss.dtype, device=loss.device).reshape(())
        # The mean over padding alone is NaN, and must count nothing.
        weighted = torch.where(weight > 0, loss.detach().reshape(()) * weight, 0)
        total_loss, total_weight = self._strategy.reduce(torch.stack((weighted, weight)), reduce_op="sum")
        return total_loss / total_weight

    def _note_skipped_step(self, optimizer: Optimizer) -> None:
        self._skipped_steps += 1
        if self._clipper is not None:
            self._clipper.skip_step(optimizer)
        said = f"{self._ranks.flag}: step {self._trainer.global_step} is skipped"
        if self._is_weightless:
            rank_zero_warn(f"{said}. Every `loss_weight` of it was 0.")
        elif self._policy.nonfinite_grads == "skip":
            rank_zero_warn(f"{said} ({self._skipped_steps} so far). Its gradients were not finite.")

    @override
    def teardown(self) -> None:
        """Restores the precision plugin."""
        self._end_fit()
        self._listeners.clear()

    def _end_fit(self) -> None:
        if self._restore_precision is not None:
            self._restore_precision()
            self._restore_precision = None
        if self._weights is not None:
            self._weights.end_backward()
            self._weights = None


def _weighed(factor: float | Tensor, gradient: Tensor) -> Tensor:
    # A factor on the device is fp32, and so would be its product with a 0-d gradient of 16 bits.
    return (gradient * factor).to(gradient.dtype)
