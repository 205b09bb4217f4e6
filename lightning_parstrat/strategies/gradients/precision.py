"""Lightning's precision plugins, with clipping and unscaling of gradients in shards or on every rank.

During a training the plugin's class is replaced by a subclass, so that the object stays the user's. The subclass keeps
the ``__qualname__``: Lightning saves a plugin's state in checkpoints under that name.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_parstrat.distributed.gradients.clipping import step_gradients
from lightning_parstrat.distributed.torch_compat import unscales_in_step
from lightning_parstrat.strategies.gradients.clipping import GradientClipper, StepSkipped
from lightning_parstrat.strategies.lightning_compat import unwrapped


class _ClippingPrecision:
    """The differences from Lightning's plugins, whichever it is.

    It has no base, so that a list of all precisions does not show it as another precision.
    """

    _clipper: GradientClipper

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps the gradients. If they are in shards, it clamps the shards."""
        self._clipper.clip_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales the gradients by the norm over all shards. Collective if they are sharded."""
        self._clipper.clip_by_norm(optimizer, clip_val)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips unscaled gradients, in manual optimization too, and for fused optimizers."""
        if clip_val > 0:
            self._unscale(optimizer)
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def _clip_gradients(self, model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Runs before every step, after the hooks that may change gradients. Clips in automatic optimization."""
        if self._clipper.looks_before_step:
            self._unscale(optimizer)
        super()._clip_gradients(model, optimizer, *args, **kwargs)
        self._clipper.check(optimizer)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps. If the step is skipped, the loss scale is updated as after a step."""
        try:
            result = super().optimizer_step(optimizer, *args, **kwargs)
        except StepSkipped:
            scaler = _enabled_scaler(self)
            if scaler is not None and scaler.has_scaled:
                scaler.unscale_(optimizer)
                scaler.leave_out(optimizer)
                scaler.update()
            raise
        self._clipper.end_step(optimizer)
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        scaler = _enabled_scaler(self)
        # Without a scale, no loss has been scaled yet.
        if scaler is not None and scaler.has_scaled:
            for one in self._clipper.measured_with(unwrapped(optimizer)):
                scaler.unscale_(one)


class _ClippingGradScaler(torch.amp.GradScaler):
    """A scaler that unscales shards, once, and skips a step on all ranks if any rank has a non-finite gradient.

    Lightning updates the scale after every optimizer's step. An update forgets which other optimizers were unscaled to
    be clipped. So the update waits for the last of them, as in torch's own recipe for several optimizers.
    """

    _clipper: GradientClipper

    @property
    def has_scaled(self) -> bool:
        """Whether a loss has been scaled."""
        return self._scale is not None

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the gradients, unless they were unscaled since the last backward or step.

        A second step without a backward divides them once more, as under `ddp`.
        """
        optimizer = unwrapped(optimizer)
        if optimizer not in self._clipper.unscaled or self._is_ready(optimizer):
            self._refuse_mixture(optimizer)
            super().unscale_(optimizer)
            self._clipper.unscaled.add(optimizer)

    def _refuse_mixture(self, optimizer: Optimizer) -> None:
        """Raises if a backward of a scaled loss may have added to gradients that were already unscaled."""
        if not self._is_ready(optimizer) and optimizer not in self._clipper.unscaled:
            raise RuntimeError(
                "In 16-mixed gradients were unscaled to be clipped, and another backward came before their optimizer"
                " has stepped. Step all optimizers whose gradients were clipped before the next backward, or take"
                " precision 'bf16-mixed'. clip_scope='global' clips all gradients that are there: take 'optimizer'."
            )

    def _is_ready(self, optimizer: Optimizer) -> bool:
        return self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY

    def leave_out(self, optimizer: Optimizer) -> None:
        """Makes the next update count what unscaling has found, although ``optimizer`` does not step."""
        self._per_optimizer_states[id(unwrapped(optimizer))]["stage"] = OptState.STEPPED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps unless a gradient is not finite. An optimizer that unscales in its step decides that on the device."""
        self._refuse_mixture(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        if unscales_in_step(optimizer):
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self._clipper.note_skip_on_device(optimizer, torch.stack(list(found)).max())
        return result

    def update(self, new_scale: Any = None) -> None:
        """Updates the loss scale, unless an unscaled optimizer has not stepped yet."""
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        if OptState.STEPPED not in stages or OptState.UNSCALED not in stages:
            super().update(new_scale)

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        gradients = step_gradients([optimizer])
        if gradients.collectives is None:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        # torch reads parameters' ``.grad``, and does not take a mixture of sharded and whole ones.
        shown = [gradient.detach() for gradient in gradients.stepped]
        for stand_in, gradient in zip(shown, gradients.stepped, strict=True):
            stand_in.grad = gradient
        stand_ins: Any = SimpleNamespace(param_groups=[{"params": shown}])
        found = super()._unscale_grads_(stand_ins, *args, **kwargs)
        # A rank without gradients in its shards has checked nothing. It takes part all the same.
        device = gradients.device
        return {device: gradients.maximum_over_ranks(found.get(device, torch.zeros((), device=device)))}

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            raise StepSkipped
        return optimizer.step(*args, **kwargs)


def equip_precision(
    plugin: Precision, clipper: GradientClipper, end_backward: Callable[[], None]
) -> Callable[[], None]:
    """Replaces the classes of the plugin and of its gradient scaler.

    Args:
        plugin: Lightning's, or a user's own.
        clipper: Clips the gradients.
        end_backward: Completes the gradients of each backward, before hooks read them.

    Returns:
        A function that restores both classes.
    """
    scaler = _enabled_scaler(plugin)
    swapped: list[tuple[Any, type]] = [(plugin, type(plugin))]
    equipped: Any = _with_mixin(type(plugin), _ClippingPrecision, Precision)

    # Around a user's own method, too. A copy of the plugin may be equipped again.
    def backward(own: Any, *args: Any, **kwargs: Any) -> None:
        super(equipped, own).backward(*args, **kwargs)
        if type(own) is equipped:
            vars(own)["_end_backward"]()

    equipped.backward = backward
    plugin.__class__ = equipped
    vars(plugin).update(_clipper=clipper, _end_backward=end_backward)
    if scaler is not None:
        swapped.append((scaler, type(scaler)))
        scaler.__class__ = _with_mixin(type(scaler), _ClippingGradScaler, torch.amp.GradScaler)
        vars(scaler).update(_clipper=clipper)

    def restore() -> None:
        for one, cls in swapped:
            one.__class__ = cls
            for name in ("_clipper", "_end_backward"):
                vars(one).pop(name, None)

    return restore


def _enabled_scaler(plugin: Any) -> Any:
    """The plugin's gradient scaler, if it is enabled. In a training it is a :class:`_ClippingGradScaler`."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def _with_mixin(cls: type, mixin: type, root: type) -> type:
    """A subclass of ``cls``. It looks up the user's methods first, then ``mixin``, then the library of ``root``."""
    library = root.__module__.partition(".")[0]
    nearest = next(base for base in cls.__mro__ if base.__module__.partition(".")[0] == library)
    bases = (mixin,) if issubclass(mixin, nearest) else (mixin, nearest)
    if cls is not nearest:
        bases = (cls, type(nearest.__name__, bases, {}))
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
