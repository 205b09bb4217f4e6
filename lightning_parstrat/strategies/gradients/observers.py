"""Finds all code that may read gradients."""

import inspect
from collections.abc import Sequence
from functools import partial
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.stepping import refuse_step_of_class
from lightning_parstrat.distributed.torch_compat import gradient_hooks, has_global_step_hooks, has_step_hooks

_OURS = "lightning_parstrat."
_LIBRARIES = (
    "lightning.pytorch.",
    "lightning.fabric.",
    "pytorch_lightning.",
    "lightning_fabric.",
    "torch.",
    _OURS,
)
_HOOKS_THAT_SEE_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
_HOOKS_AFTER_THE_STEP = (
    "lr_scheduler_step",
    "on_before_zero_grad",
    "on_fit_end",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "training_step",
)
"""Hooks that run when gradients have been used. They count only if their code mentions gradients."""
_HOOKS_BETWEEN_MICRO_BATCHES = (
    "on_before_backward",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_validation_end",
    "on_validation_start",
    "training_step",
    "validation_step",
)
_READS = ("grad", "grad_norm")
_READS_OR_CLEARS = (*_READS, "zero_grad")
CLIPPING_METHODS = ("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients")
"""Methods of a precision plugin."""
_PLUGIN_METHODS_THAT_SEE_GRADIENTS = (*CLIPPING_METHODS, "optimizer_step")


def observers_of_gradients(
    module: LightningModule,
    callbacks: Sequence[Callback],
    optimizers: Sequence[Optimizer],
    precision: Precision,
) -> list[str]:
    """The user's code that runs while gradients exist, and so may read or change them.

    Lightning's own callbacks and plugins read no gradients in these hooks. The exception is ``LambdaCallback``, which
    runs the user's functions.

    Args:
        module: The module in training.
        callbacks: The trainer's callbacks.
        optimizers: The module's optimizers.
        precision: The precision plugin. A user's own plugin may clip by itself.

    Returns:
        Names to show to the user. Empty if no code reads gradients.
    """
    observers = []
    if not module.automatic_optimization:
        observers.append("manual optimization")
    for owner in (module, *callbacks):
        observers += [f"{type(owner).__name__}.{hook}" for hook in users_own(owner, _HOOKS_THAT_SEE_GRADIENTS)]
        after = users_own(owner, _HOOKS_AFTER_THE_STEP)
        observers += [f"{type(owner).__name__}.{hook}" for hook in after if mentions_gradients(owner, hook)]
    plugin_methods = users_own(precision, _PLUGIN_METHODS_THAT_SEE_GRADIENTS)
    observers += [f"{type(precision).__name__}.{method}" for method in plugin_methods]
    for optimizer in optimizers:
        if has_step_hooks(optimizer, besides=refuse_step_of_class):
            observers.append(f"step hooks of {type(optimizer).__name__}")
    if has_global_step_hooks():
        observers.append("global optimizer step hooks")
    return observers


def observers_between_micro_batches(module: LightningModule, callbacks: Sequence[Callback]) -> list[str]:
    """The user's code that may read, change or clear accumulated gradients before the window's last micro-batch.

    These come on top of :func:`observers_of_gradients`. Hooks of parameters count if they exist now.

    Args:
        module: The module in training.
        callbacks: The trainer's callbacks.

    Returns:
        Names to show to the user. Empty if there is no such code.
    """
    observers = [
        f"{type(owner).__name__}.{hook}"
        for owner in (module, *callbacks)
        for hook in users_own(owner, _HOOKS_BETWEEN_MICRO_BATCHES)
        if mentions_gradients(owner, hook, _READS_OR_CLEARS)
    ]
    hooks = (hook.func if isinstance(hook, partial) else hook for hook in gradient_hooks(module.parameters()))
    if any(not (getattr(hook, "__module__", None) or "").startswith(_OURS) for hook in hooks):
        observers.append("hooks of parameters")
    return observers


def users_own(owner: Any, names: Sequence[str]) -> list[str]:
    """The methods that a user has defined, on the class or on the object. LambdaCallback sets them on the object."""
    return [name for name in names if name in vars(owner) or _is_users(getattr(type(owner), name, None))]


def _is_users(function: Any) -> bool:
    if function is None:
        return False
    return not getattr(function, "__module__", "").startswith(_LIBRARIES)


def mentions_gradients(owner: Any, name: str, attributes: Sequence[str] = _READS) -> bool:
    """Whether a method's code reads an attribute ``grad``. Methods of the object that it calls count, too.

    Args:
        owner: The object.
        name: The method's name.
        attributes: The names that count as reading.
    """
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        method = waiting.pop()
        seen.add(method)
        names = _names_in(getattr(inspect.unwrap(getattr(owner, method)), "__code__", None))
        if not names.isdisjoint(attributes):
            return True
        waiting += [called for called in names - seen if _is_users(_method(owner, called))]
    return False


def _method(owner: Any, name: str) -> Any:
    found = getattr(type(owner), name, None)
    return found if inspect.isroutine(found) else None


def _names_in(code: CodeType | None) -> set[str]:
    """All names that a function's code refers to, with those of the functions inside it."""
    if code is None:
        return set()
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
