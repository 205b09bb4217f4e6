"""Who may look at gradients: the one place that knows."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_HOOKS_THAT_SEE_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "optimizer_step",
)


def observers_of_gradients(
    module: LightningModule, callbacks: Sequence[Callback], optimizers: Sequence[Optimizer]
) -> list[str]:
    """Everything of the user's that runs while gradients exist, and so may read or change them.

    What Lightning itself ships in these places reads no gradients, with the exception of ``LambdaCallback``, which runs
    the user's functions.

    Args:
        module: The module in training.
        callbacks: The trainer's.
        optimizers: The module's.

    Returns:
        Names to show to the user; empty where nobody looks.
    """
    observers = []
    if not module.automatic_optimization:
        observers.append("manual optimization")
    observers += [f"{type(module).__name__}.{hook}" for hook in _users_hooks(module)]
    observers += [f"{type(callback).__name__}.{hook}" for callback in callbacks for hook in _users_hooks(callback)]
    for optimizer in optimizers:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            observers.append(f"step hooks of {type(optimizer).__name__}")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        observers.append("global optimizer step hooks")
    return observers


def _users_hooks(owner: Any) -> list[str]:
    """The hooks that someone other than Lightning defined, on the class or (as LambdaCallback does) on the object."""
    return [
        hook
        for hook in _HOOKS_THAT_SEE_GRADIENTS
        if hook in vars(owner) or _defined_outside_lightning(getattr(type(owner), hook, None))
    ]


def _defined_outside_lightning(function: Any) -> bool:
    if function is None:
        return False
    return not getattr(function, "__module__", "").startswith(("lightning.pytorch.", "lightning.fabric."))
