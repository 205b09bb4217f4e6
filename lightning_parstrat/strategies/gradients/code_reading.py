"""Whether a hook that comes after the step is known to leave gradients alone, by how little its code does.

Known are averages of weights and learning rate schedulers that libraries ship, and what is counted and logged beside
them. All other code may read gradients: to show them to whoever does not look costs an all-gather per step, and not to
show them to whoever does would be wrong without a word.
"""

import dis
import inspect
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_HARMLESS = frozenset(
    (
        "callback_metrics",
        "current_epoch",
        "detach",
        "global_step",
        "is_global_zero",
        "is_last_batch",
        "item",
        "log",
        "log_dict",
        "logged_metrics",
        "lr_scheduler_step",
        "num_training_batches",
        "on_before_zero_grad",
        "on_train_batch_end",
        "step",
        "step_update",
        "trainer",
        "update",
        "update_parameters",
    )
)
"""Names of what hooks may use: of Lightning's objects, and of averages and schedulers that libraries ship."""
_BUILTINS = frozenset(("abs", "bool", "float", "int", "len", "max", "min", "print", "range", "round", "super"))
_LIBRARIES = frozenset(
    ("ema_pytorch", "lightning", "lightning_fabric", "pytorch_lightning", "timm", "torch", "torch_ema", "transformers")
)


def may_read_gradients(hook: Any, owner: Any, found: Sequence[Any] = (), handed: Iterable[Any] = ()) -> bool:
    """Whether a hook may read gradients; False only where all that it does is known not to.

    Args:
        hook: The function or method.
        owner: The object whose hook it is.
        found: Other objects whose attributes it may use: the module and the trainer.
        handed: What it may be handed to call: schedulers.
    """
    function = _undecorated(hook.__func__ if isinstance(hook, MethodType) else hook)
    if function is None or not all(map(_is_librarys, handed)):
        return True
    # Beside the one that is called, those that it calls by `super()`.
    defined = [vars(cls).get(function.__name__) for cls in type(owner).__mro__ if not _is_of_library(cls)]
    functions = [function, *(_undecorated(one) for one in defined if one is not None)]
    return not all(one is not None and _is_harmless(one, (owner, *found)) for one in functions)


def _undecorated(function: Any) -> FunctionType | None:
    """The function itself, or that within ``@torch.no_grad()``; None where it is no function."""
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") == "torch.utils._contextlib":
        function = getattr(function, "__wrapped__", None)
    return function if isinstance(function, FunctionType) else None


def _is_harmless(function: FunctionType, objects: Sequence[Any]) -> bool:
    code = function.__code__
    makes_functions = any(isinstance(constant, CodeType) for constant in code.co_consts)
    if makes_functions or set(code.co_freevars) - {"__class__"}:
        return False
    for instruction in dis.get_instructions(code):
        if instruction.opcode not in dis.hasname:
            continue
        name, kind = instruction.argval, instruction.opname
        if kind.startswith("LOAD") and ("ATTR" in kind or "METHOD" in kind):
            harmless = _is_harmless_attribute(name, objects)
        elif kind.startswith("STORE_ATTR"):
            harmless = True
        else:
            harmless = kind == "LOAD_GLOBAL" and name in _BUILTINS and name not in function.__globals__
        if not harmless:
            return False
    return True


def _is_harmless_attribute(name: str, objects: Sequence[Any]) -> bool:
    """Whether an attribute may be used: as what it is of those ``objects`` that have it, else by its name."""
    values = [value for value in (_attribute(one, name) for one in objects) if value is not None]
    if not values:
        return name in _HARMLESS
    return all(_is_plain(value) or _is_librarys(value) or (name in _HARMLESS and _is_method(value)) for value in values)


def _attribute(thing: Any, name: str) -> Any:
    """The attribute without asking the object for it; its properties and functions as they stand in the class."""
    children = dict(thing.named_children()) if isinstance(thing, nn.Module) else {}
    return children[name] if name in children else inspect.getattr_static(thing, name, None)


def _is_method(value: Any) -> bool:
    """Whether it is a method or property of Lightning's."""
    function = value.fget if isinstance(value, property) else value
    return isinstance(function, FunctionType) and _is_of_library(function)


def _is_plain(value: Any) -> bool:
    if isinstance(value, nn.Module):
        # Metrics are called, and call what users write.
        return not any(cls.__module__.startswith("torchmetrics.") for cls in type(value).__mro__)
    return isinstance(value, (bool, int, float, str, Tensor))


def _is_librarys(value: Any) -> bool:
    """Whether an object is of a class that a library ships, and keeps no function of the user's."""
    if callable(value) or not _is_of_library(type(value)):
        return False
    kept = [one for held in vars(value).values() for one in (held if isinstance(held, (list, tuple)) else [held])]
    return all(_is_of_library(one) for one in kept if isinstance(one, (FunctionType, MethodType)))


def _is_of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES
