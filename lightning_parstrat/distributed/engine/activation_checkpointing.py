"""Activation checkpointing: modules that keep their inputs alone, and compute the rest again in backward."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def modules_of_classes(module: nn.Module, wanted: Collection[str | type], argument: str) -> set[nn.Module]:
    """The modules below a module that are of these classes, or of their subclasses. Not collective.

    Args:
        module: The root, which is not among them.
        wanted: Classes or their names.
        argument: The user's argument, for the error.

    Raises:
        ValueError: There is no module of one of them.
    """
    chosen = {m for m in module.modules() if m is not module and _classes(m) & set(wanted)}
    if missing := set(wanted).difference(*map(_classes, chosen)):
        raise ValueError(
            f"Invalid {argument}: {sorted(map(str, missing))}. No module within {type(module).__name__} is of such a"
            " class; print it to see their names."
        )
    return chosen


def checkpoint_activations(module: nn.Module, wanted: Collection[str | type]) -> Callable[[], None]:
    """Makes modules of these classes compute their activations again in backward. Not collective.

    Args:
        module: The root.
        wanted: Classes or their names.

    Returns:
        Undoes it.

    Raises:
        ValueError: There is no module of one of these classes.
    """
    chosen = modules_of_classes(module, wanted, "activation_checkpointing_policy")
    before = {part: vars(part).get("forward") for part in chosen}
    for part in chosen:
        # On the object: names of parameters and the class stay.
        vars(part)["forward"] = functools.partial(checkpoint, part.forward, use_reentrant=False)

    def undo() -> None:
        for part, forward in before.items():
            vars(part).pop("forward", None)
            vars(part).update({} if forward is None else {"forward": forward})

    return undo


def _classes(module: nn.Module) -> set[str | type[Any]]:
    """A module's class and its bases, and their names."""
    classes = set(type(module).__mro__) - {nn.Module, object}
    return {*classes, *(cls.__name__ for cls in classes)}
