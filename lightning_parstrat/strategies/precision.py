"""Lightning's precision plugins, clipping and unscaling gradients wherever they are.

The plugin's class is swapped for a subclass while a training lasts, so that the object stays the user's. It keeps its
``__qualname__``, under which Lightning files a plugin's state in checkpoints.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_parstrat.distributed.clipping import hidden_sharding
from lightning_parstrat.strategies.clipping import GradientClipper, StepSkipped


class _ClippingPrecision:
    """What differs from Lightning's plugins, whichever it is.

    It has no base, so that it is not taken for a precision of its own where all of them are listed.
    """

    _clipper: GradientClipper

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps the gradients, in shards where they are there."""
        self._clipper.clip_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales the gradients by the norm of the whole. Collective where they are sharded."""
        self._clipper.clip_by_norm(optimizer, clip_val)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips true gradients, not those of a scaled loss: in manual optimization too, and for fused optimizers."""
        if clip_val > 0:
            self._unscale(optimizer)
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[arg-type]

    def _clip_gradients(self, model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Runs before every step, after the hooks that may change gradients; clips in automatic optimization."""
        if self._clipper.looks_before_step:
            self._unscale(optimizer)
        users_own = is_overridden("configure_gradient_clipping", model)
        self._clipper.check(optimizer, clipping_follows=model.automatic_optimization and not users_own)
        super()._clip_gradients(model, optimizer, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps; where the step is skipped, lets the loss scale go on as after a step."""
        try:
            result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        except StepSkipped:
            scaler = _scaler_of(self)
            if scaler is not None and scaler._scale is not None:
                # It updates by what unscaling found.
                self._unscale(optimizer)
                scaler.update()
            raise
        self._clipper.end_step(optimizer)
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        scaler = _scaler_of(self)
        # Without a scale no loss has been scaled yet.
        if scaler is not None and scaler._scale is not None:
            for one in self._clipper.measured_with(optimizer):
                scaler.unscale_(one)


class _ClippingGradScaler(torch.amp.GradScaler):
    """A scaler that unscales shards, once, and skips a step on all ranks when any found a non-finite gradient."""

    _unscaled: set[int]
    _on_skip: Callable[[Optimizer], None]

    def scale(self, outputs: Any) -> Any:
        """Scales a loss, whose backward is going to add scaled gradients."""
        self._unscaled.clear()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales, but not again what clipping has unscaled since the last backward."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED and id(optimizer) in self._unscaled:
            return
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        sharding = hidden_sharding(optimizer)
        if sharding is None:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        sharding.finish_gradients()
        with sharding.shard_groups(optimizer):
            found = super()._unscale_grads_(optimizer, *args, **kwargs)
        # A rank without gradients in its shards has looked at nothing, and takes part all the same.
        device = sharding.device
        return {device: sharding.maximum_over_ranks(found.get(device, torch.zeros((), device=device)))}

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            self._on_skip(optimizer)
            return None
        return optimizer.step(*args, **kwargs)


def equip_precision(
    plugin: Precision, clipper: GradientClipper, on_skip: Callable[[Optimizer], None]
) -> Callable[[], None]:
    """Swaps the classes of the plugin and of its gradient scaler.

    Args:
        plugin: Lightning's, or a user's own.
        clipper: Clips.
        on_skip: Called when the loss scale was too large, and an optimizer's step was left out for it.

    Returns:
        What gives both their own classes back.
    """
    scaler = getattr(plugin, "scaler", None)
    swapped: list[tuple[Any, type]] = [(plugin, type(plugin))]
    plugin.__class__ = _with_mixin(type(plugin), _ClippingPrecision, "lightning.")
    plugin._clipper = clipper  # type: ignore[attr-defined]
    if isinstance(scaler, torch.amp.GradScaler):
        swapped.append((scaler, type(scaler)))
        scaler.__class__ = _with_mixin(type(scaler), _ClippingGradScaler, "torch.")
        scaler._unscaled, scaler._on_skip = set(), on_skip  # type: ignore[attr-defined]

    def restore() -> None:
        for one, cls in swapped:
            one.__class__ = cls
            for name in ("_clipper", "_unscaled", "_on_skip"):
                vars(one).pop(name, None)

    return restore


def _scaler_of(plugin: Any) -> torch.amp.GradScaler | None:
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def _with_mixin(cls: type, mixin: type, library: str) -> type:
    """A subclass of ``cls`` that asks ``mixin`` before the library's classes, and the user's own before both."""
    nearest = next(base for base in cls.__mro__ if base.__module__.startswith(library))
    bases = (mixin,) if issubclass(mixin, nearest) else (mixin, nearest)
    if cls is not nearest:
        bases = (cls, type(nearest.__name__, bases, {}))
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
