"""Finds all code that may read gradients.

Methods of users that run between backward and step may do so. Any other method does if its code has the name ``grad``.
"""

import inspect
from collections.abc import Collection, Sequence
from functools import partial
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.stepping import refuse_step_of_class
from lightning_parstrat.distributed.torch_compat import (
    accumulated_gradient_hooks,
    has_global_step_hooks,
    has_step_hooks,
)

_OURS = "lightning_parstrat."
_LIBRARIES = (
    "lightning.pytorch.",
    "lightning.fabric.",
    "pytorch_lightning.",
    "lightning_fabric.",
    "torch.",
    _OURS,
)
_HOOKS_THAT_SEE_GRADIENTS = {
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
}
_PLUGIN_METHODS_THAT_SEE_GRADIENTS = {"clip_grad_by_norm", "clip_grad_by_value", "clip_gradients", "optimizer_step"}
_READS = {"grad", "grad_norm"}
_CLEARS = {"zero_grad"}


def observers_of_gradients(
    module: LightningModule,
    callbacks: Sequence[Callback],
    optimizers: Sequence[Optimizer],
    precision: Precision,
) -> list[str]:
    """The code that may read or change gradients.

    Args:
        module: The module in training. Under manual optimization it reads gradients by itself.
        callbacks: The trainer's callbacks.
        optimizers: The optimizers in training.
        precision: The precision plugin. A user's own may clip by itself.

    Returns:
        Names to show to the user. Empty if no code reads gradients.
    """
    observers = [] if module.automatic_optimization else ["manual optimization"]
    for owner in (module, *callbacks):
        observers += _named(owner, _HOOKS_THAT_SEE_GRADIENTS, _READS)
    observers += _named(precision, _PLUGIN_METHODS_THAT_SEE_GRADIENTS, ())
    for optimizer in optimizers:
        if has_step_hooks(optimizer, besides=refuse_step_of_class):
            observers.append(f"step hooks of {type(optimizer).__name__}")
    if has_global_step_hooks():
        observers.append("global optimizer step hooks")
    return observers


def observers_between_micro_batches(module: LightningModule, callbacks: Sequence[Callback]) -> list[str]:
    """The user's code that may clear or change accumulated gradients before the window's last micro-batch.

    These come on top of :func:`observers_of_gradients`. Hooks of parameters count if they exist now.

    Args:
        module: The module in training.
        callbacks: The trainer's callbacks.

    Returns:
        Names to show to the user. Empty if there is no such code.
    """
    observers = [name for owner in (module, *callbacks) for name in _named(owner, (), _CLEARS)]
    registered = (accumulated_gradient_hooks(parameter) or {} for parameter in module.parameters())
    hooks = (one.func if isinstance(one, partial) else one for of_one in registered for one in of_one.values())
    if any(not (getattr(hook, "__module__", None) or "").startswith(_OURS) for hook in hooks):
        observers.append("hooks of parameters")
    return observers


def users_methods(owner: Any) -> dict[str, Any]:
    """The methods that a user has defined, on the class or on the object. LambdaCallback sets them on the object."""
    own = vars(owner)
    names = sorted({*dir(type(owner)), *own})
    found = {name: _function(own[name] if name in own else getattr(type(owner), name, None)) for name in names}
    return {
        name: one
        for name, one in found.items()
        if inspect.isroutine(one) and not (getattr(one, "__module__", None) or "").startswith(_LIBRARIES)
    }


def _function(value: Any) -> Any:
    """The code that runs if a value is called. LambdaCallback takes any callable, such as a `functools.partial`."""
    while isinstance(value, partial):
        value = value.func
    is_object = callable(value) and not (inspect.isroutine(value) or inspect.isclass(value))
    return type(value).__call__ if is_object else value


def _named(owner: Any, hooks: Collection[str], names: Collection[str]) -> list[str]:
    """The user's methods that are among ``hooks``, or whose code has one of ``names``."""
    return [
        f"{type(owner).__name__}.{name}"
        for name, method in users_methods(owner).items()
        if name in hooks or not _names_in(getattr(inspect.unwrap(method), "__code__", None)).isdisjoint(names)
    ]


def _names_in(code: CodeType | None) -> set[str]:
    """All names that a function's code refers to, with those of the functions inside it."""
    if code is None:
        return set()
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
