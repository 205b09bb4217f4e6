"""What happens to gradients between backward and step: do they count, are they finite, what is their norm.

One implementation for both strategies; where gradients are (in shards, or on every rank) is known to the floor below.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.policy import GradientPolicy
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
        norm: Before clipping, a 0-d tensor.
        coefficient: What clipping by norm multiplied gradients by, a 0-d tensor; None where there was no clipping.
        skipped: 1 where the optimizer has left the step out by itself, which only the device knows, else 0; or None.
        is_agreed: Whether it is over all ranks' shards, and so the same on all of them.
    """

    norm: Tensor
    coefficient: Tensor | None = None
    skipped: Tensor | None = None
    is_agreed: bool = False


class StepSkipped(Exception):
    """Leaves an optimizer's step before it has changed anything; all ranks leave it together."""


class NonfiniteGradientError(RuntimeError):
    """Gradients became NaN or infinite on some rank; raised on all of them."""


class GradientClipper:
    """Measures and clips gradients as the policy says. Creating it is collective.

    Args:
        policy: The policy.
        control: Tells all ranks what one of them has found.
        optimizers: All optimizers in training, asked for when the norm is to be taken over all of them.
        is_weightless: Whether no micro-batch of this step has any weight, the same on all ranks.
        listeners: Are given the norm of every step.
    """

    def __init__(
        self,
        policy: GradientPolicy,
        control: Collectives,
        optimizers: Callable[[], list[Optimizer]],
        is_weightless: Callable[[], bool],
        listeners: Sequence[Callable[[GradientNorm], None]],
    ) -> None:
        self.latest: GradientNorm | None = None
        self.skipped_on_device: Tensor | None = None
        self.unscaled: set[Optimizer] = set()
        """Those whose gradients have been divided by the loss scale since the last backward."""
        self._policy, self._p = policy, policy.p
        self._control = control
        self._optimizers = optimizers
        self._is_weightless = is_weightless
        self._listeners = listeners
        # Measuring is collective: where one rank's callback asks for it, all take part.
        self._any_listens = any_rank(bool(listeners), control)
        self._measured: dict[Optimizer, GradientNorm] = {}
        self._reusable: set[Optimizer] = set()
        self._clipped: set[Optimizer] = set()
        self._of_all: GradientNorm | None = None

    def begin_backward(self) -> None:
        """Forgets what was measured: new gradients are about to come."""
        self._measured.clear()
        self._reusable.clear()
        self._clipped.clear()
        self._of_all = None

    def measured_with(self, optimizer: Optimizer) -> list[Optimizer]:
        """The optimizers whose gradients are one whole with those of ``optimizer``. Collective."""
        optimizer = unwrapped(optimizer)
        if self._policy.clip_scope == "optimizer":
            return [optimizer]
        return [other for other in map(unwrapped, self._optimizers()) if other is optimizer or has_gradients(other)]

    @property
    def looks_before_step(self) -> bool:
        """Whether :meth:`check` will look at gradients."""
        return self._policy.nonfinite_grads != "propagate" or self._any_listens

    def check(self, optimizer: Optimizer, clipping_follows: bool) -> None:
        """Looks at the gradients that ``optimizer`` is about to step with, if the policy or a listener asks for it.

        Collective. The norm, put together by one small all-reduce on the gradients' device, tells all ranks what any of
        them has; only ``"skip"`` and ``"raise"`` wait for it on the host.

        Args:
            optimizer: The optimizer.
            clipping_follows: Whether clipping comes next, with nothing in between that may change gradients: then it
                need not measure them again.

        Raises:
            StepSkipped: They are not finite, and such steps are skipped or an error; or nothing in this step has any
                weight.
        """
        optimizer = unwrapped(optimizer)
        if self._is_weightless():
            raise StepSkipped
        if not self.looks_before_step:
            return
        if optimizer not in self._measured:
            self._note(optimizer, self._measure(optimizer, step_gradients([optimizer])))
            if clipping_follows:
                self._reusable.add(optimizer)
        if self._policy.nonfinite_grads != "propagate" and self._is_nonfinite(optimizer, self._measured[optimizer]):
            raise StepSkipped

    def clip_by_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scales an optimizer's gradients; collective where they are sharded.

        Between two backwards the norm over all optimizers (``clip_scope="global"``) is taken once, before any of them
        is clipped. With one that is clipped again, the same begins anew.
        """
        optimizer = unwrapped(optimizer)
        gradients = step_gradients([optimizer])
        if optimizer in self._reusable:
            measured = self._measured[optimizer]
        else:
            if optimizer in self._clipped:
                self._clipped.clear()
                self._of_all = None
            measured = self._measure(optimizer, gradients)
        self._reusable.discard(optimizer)
        self._clipped.add(optimizer)
        coefficient = scale_to_norm(gradients, measured.norm, max_norm)
        self._note(optimizer, replace(measured, coefficient=coefficient))

    def clip_by_value(self, optimizer: Optimizer, max_value: float) -> None:
        """Clamps an optimizer's gradients; collective where they are sharded and still under way."""
        clip_gradients_by_value(step_gradients([unwrapped(optimizer)]), max_value)

    def end_step(self, optimizer: Optimizer) -> None:
        """Hands the norm to whoever asked for it: ``optimizer`` has stepped."""
        measured = self._measured.pop(unwrapped(optimizer), None)
        if measured is not None:
            for listener in self._listeners:
                listener(measured)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Keeps the norm from those who asked for it: ``optimizer`` will not step."""
        self._measured.pop(unwrapped(optimizer), None)
        self._reusable.discard(unwrapped(optimizer))

    def note_skip_on_device(self, optimizer: Optimizer, skipped: Tensor) -> None:
        """Takes note of whether ``optimizer`` has left its step out, a 0-d tensor of 1 or 0. Waits for nothing."""
        before = self.skipped_on_device
        self.skipped_on_device = skipped.clone() if before is None else before + skipped
        measured = self._measured.get(unwrapped(optimizer))
        if measured is not None:
            measured.skipped = skipped

    def _note(self, optimizer: Optimizer, measured: GradientNorm) -> None:
        self._measured[optimizer] = self.latest = measured

    def _measure(self, optimizer: Optimizer, gradients: StepGradients) -> GradientNorm:
        if self._policy.clip_scope == "optimizer":
            return self._norm_of(gradients, self._p)
        if self._of_all is None:
            self._of_all = self._norm_of(step_gradients(self.measured_with(optimizer)), self._p)
        return replace(self._of_all)

    def _norm_of(self, gradients: StepGradients, norm_type: float) -> GradientNorm:
        return GradientNorm(gradient_norm(gradients, norm_type), is_agreed=gradients.collectives is not None)

    def _is_nonfinite(self, optimizer: Optimizer, measured: GradientNorm) -> bool:
        if not self._on_any_rank(measured):
            return False
        # A norm overflows before gradients do, unless it is their maximum.
        largest = self._norm_of(step_gradients(self.measured_with(optimizer)), math.inf)
        return self._on_any_rank(largest)

    def _on_any_rank(self, measured: GradientNorm) -> bool:
        """Whether the norm is not finite, on any rank."""
        is_nonfinite = not math.isfinite(measured.norm.item())
        # Of gradients that every rank has it need not be the same: parameters may be there that nobody synchronises, or
        # that a user has changed on one rank.
        return is_nonfinite if measured.is_agreed else any_rank(is_nonfinite, self._control)
