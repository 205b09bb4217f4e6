"""Gradients between backward and step: whether they count and are finite, their norm, and clipping.

All strategies share this implementation. The floor below knows whether gradients are in shards or on every rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.policy import CommonPolicy
from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.gradients.clipping import (
    StepGradients,
    clip_gradients_by_value,
    gradient_norm,
    has_gradients,
    scale_to_norm,
    step_gradients,
)
from lightning_parstrat.strategies.lightning_compat import unwrapped


@dataclass
class GradientNorm:
    """The norm of a step's gradients.

    Attributes:
        norm: The norm before clipping, a 0-d tensor.
        coefficient: The factor by which clipping by norm multiplied gradients, a 0-d tensor. None without clipping.
        skipped: 1 if the optimizer has skipped the step, else 0. A tensor, because only the device knows. Or None.
        is_agreed: Whether the norm is over all ranks' shards, and so the same on all ranks.
    """

    norm: Tensor
    coefficient: Tensor | None = None
    skipped: Tensor | None = None
    is_agreed: bool = False


class StepSkipped(Exception):
    """Ends an optimizer's step before it has changed anything. All ranks raise it together."""


class GradientClipper:
    """Measures and clips gradients by the policy. Creating it is collective.

    Args:
        policy: The policy.
        control: Sends what one rank has found to all ranks.
        optimizers: Returns all optimizers in training. Called when the norm is taken over all of them.
        is_weightless: Whether no micro-batch of this step has any weight, the same on all ranks.
        listeners: Called with the norm of every step.
        gradients: Finds the gradients that optimizers are about to step with.
    """

    def __init__(
        self,
        policy: CommonPolicy,
        control: Collectives,
        optimizers: Callable[[], list[Optimizer]],
        is_weightless: Callable[[], bool],
        listeners: Sequence[Callable[[GradientNorm], None]],
        gradients: Callable[[Sequence[Optimizer]], StepGradients] = step_gradients,
    ) -> None:
        self.latest: GradientNorm | None = None
        self.skipped_on_device: Tensor | None = None
        self.unscaled: set[Optimizer] = set()
        """Optimizers whose gradients have been divided by the loss scale since the last backward."""
        self._policy, self._p, self._control = policy, policy.p, control
        self._optimizers = optimizers
        self._is_weightless = is_weightless
        self._listeners, self._gradients = listeners, gradients
        # Measuring is collective: if one rank's callback needs the norm, all ranks take part.
        self._any_listens = any_rank(bool(listeners), control)
        self._measured: dict[Optimizer, GradientNorm] = {}
        """The norms of steps that are still to come. Without a coefficient, gradients are still to be clipped by it."""
        self._clamped: set[Optimizer] = set()
        """Optimizers whose gradients were clipped by value since the last backward."""

    def begin_backward(self) -> None:
        """Forgets the measured norms, because new gradients are about to come."""
        self._measured.clear()
        self._clamped.clear()
        self.unscaled.clear()

    def measured_with(self, optimizer: Optimizer) -> list[Optimizer]:
        """The optimizers whose gradients are clipped together with those of ``optimizer``. Collective."""
        if self._policy.clip_scope == "optimizer":
            return [optimizer]
        return [other for other in map(unwrapped, self._optimizers()) if other is optimizer or has_gradients(other)]

    @property
    def looks_before_step(self) -> bool:
        """Whether :meth:`check` measures gradients."""
        return self._policy.nonfinite_grads != "propagate" or self._any_listens

    def check(self, optimizer: Optimizer) -> None:
        """Measures the gradients that ``optimizer`` is about to step with, if clipping has not measured them.

        Collective. One small all-reduce on the gradients' device computes the norm. A non-finite gradient on any rank
        makes it non-finite on all ranks. Only ``"skip"`` and ``"raise"`` wait for the norm on the host.

        Args:
            optimizer: The optimizer.

        Raises:
            StepSkipped: Gradients are not finite, and the policy is to skip or raise. Or no micro-batch of this step
                has any weight.
        """
        if self._is_weightless():
            raise StepSkipped
        if not self.looks_before_step:
            return
        optimizer = unwrapped(optimizer)
        if optimizer not in self._measured:
            self._measure(optimizer, self._gradients([optimizer]))
        if self._policy.nonfinite_grads != "propagate" and self._is_nonfinite(optimizer):
            raise StepSkipped

    def clip_by_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scales an optimizer's gradients. Collective if they are sharded.

        Between two backwards, the norm over all optimizers (``clip_scope="global"``) is measured once, before any of
        them is clipped. If an optimizer is clipped again, the norm is measured again.
        """
        optimizer = unwrapped(optimizer)
        gradients = self._gradients([optimizer])
        measured = self._measured.get(optimizer)
        if measured is None or measured.coefficient is not None or optimizer in self._clamped:
            measured = self._measure(optimizer, gradients)
        measured.coefficient = scale_to_norm(gradients, measured.norm, max_norm)
        self.latest = measured

    def clip_by_value(self, optimizer: Optimizer, max_value: float) -> None:
        """Clamps an optimizer's gradients. Collective if they are sharded and still in flight, or are measured."""
        optimizer = unwrapped(optimizer)
        gradients = self._gradients([optimizer])
        if self.looks_before_step and optimizer not in self._measured:
            # Infinite gradients are finite when they are clamped.
            self._measure(optimizer, gradients)
        self._clamped.add(optimizer)
        clip_gradients_by_value(gradients, max_value)

    def end_step(self, optimizer: Optimizer) -> None:
        """Calls the listeners with the norm, because ``optimizer`` has stepped."""
        measured = self._measured.pop(unwrapped(optimizer), None)
        if measured is not None:
            for listener in self._listeners:
                listener(measured)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Forgets the norm without a call of the listeners, because ``optimizer`` will not step."""
        self._measured.pop(unwrapped(optimizer), None)

    def note_skip_on_device(self, optimizer: Optimizer, skipped: Tensor) -> None:
        """Notes whether ``optimizer`` has skipped its step, a 0-d tensor of 1 or 0. Does not wait for the device."""
        before = self.skipped_on_device
        self.skipped_on_device = skipped.clone() if before is None else before + skipped
        measured = self._measured.get(unwrapped(optimizer))
        if measured is not None:
            measured.skipped = skipped

    def _measure(self, optimizer: Optimizer, gradients: StepGradients) -> GradientNorm:
        """Measures the gradients that are clipped together, once for all of their optimizers."""
        together = self.measured_with(optimizer)
        measured = self._norm_of(gradients if together == [optimizer] else self._gradients(together), self._p)
        self._measured.update((other, replace(measured)) for other in together)
        self.latest = self._measured[optimizer]
        return self.latest

    def _norm_of(self, gradients: StepGradients, norm_type: float) -> GradientNorm:
        return GradientNorm(gradient_norm(gradients, norm_type), is_agreed=gradients.collectives is not None)

    def _is_nonfinite(self, optimizer: Optimizer) -> bool:
        if not self._on_any_rank(self._measured[optimizer]):
            return False
        if optimizer in self._clamped:
            return True
        # A norm can overflow although no gradient does, unless the norm is their maximum.
        largest = self._norm_of(self._gradients(self.measured_with(optimizer)), math.inf)
        return self._on_any_rank(largest)

    def _on_any_rank(self, measured: GradientNorm) -> bool:
        """Whether the norm is not finite on any rank."""
        is_nonfinite = not math.isfinite(measured.norm.item())
        # Gradients that every rank has may differ between ranks. Some parameters may not be synchronized, or the user
        # may have changed them on one rank.
        return is_nonfinite if measured.is_agreed else any_rank(is_nonfinite, self._control)
