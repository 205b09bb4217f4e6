"""Activation checkpointing: modules that keep their inputs alone, and compute the rest again in backward."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parstrat.distributed.torch_compat import version_of


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
        vars(part)["forward"] = functools.partial(_checkpointed, part, part.forward)

    def undo() -> None:
        for part, forward in before.items():
            vars(part).pop("forward", None)
            vars(part).update({} if forward is None else {"forward": forward})

    return undo


def _checkpointed(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    changed: list[Tensor] = []
    # A module may have arguments that are named as those of `checkpoint`.
    call = functools.partial(forward, **kwargs)
    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        context_fn=lambda: (_noting_changes(part, changed), BuffersKept(changed)),
    )


@contextmanager
def _noting_changes(part: nn.Module, changed: list[Tensor]) -> Iterator[None]:
    before = [(buffer, version_of(buffer)) for buffer in part.buffers()]
    yield
    changed += [buffer for buffer, version in before if version_of(buffer) != version]
    # The kernels of batch norms change their statistics without a count.
    norms = [one for one in part.modules() if one.training and getattr(one, "track_running_stats", False)]
    changed += [buffer for norm in norms for buffer in norm.buffers() if not any(buffer is one for one in changed)]


class BuffersKept:
    """Within it, changes of buffers are lost, such as those of a second forward. Not collective.

    It may be entered again: each backward through a graph that is kept does so.

    Args:
        buffers: Are read when it is entered.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._values: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._values = [(buffer, buffer.clone()) for buffer in self._buffers]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for buffer, value in self._values:
            buffer.copy_(value)
        self._values.clear()


def _classes(module: nn.Module) -> set[str | type[Any]]:
    """A module's class and its bases, and their names, with their module or without."""
    classes = set(type(module).__mro__) - {nn.Module, object}
    names = {name for cls in classes for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
    return classes | names
