"""Sharded modules as plain ones: for a while, or as deep copies, which FSDP2 refuses."""

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.zero3.state import let_whole_states_be_loaded

_ADDED: set[str] = set()
"""Names of attributes that modules have for being sharded."""

_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]
_WHO_SHARDS = ("torch.distributed.fsdp.", f"{__name__.partition('.')[0]}.")


@contextmanager
def plain(module: nn.Module) -> Iterator[None]:
    """Within it a module and all below it are of their own classes, without what sharding them has put into them.

    Parameters stay as they are. Nothing is gathered: a module can be called if its parameters are whole. Not
    collective.

    Args:
        module: Sharded by FSDP2.
    """
    with ExitStack() as undo:
        for part in list(module.modules()):
            _make_plain(part, undo)
        yield


def _make_plain(part: nn.Module, undo: ExitStack) -> None:
    own = vars(part)
    if isinstance(part, FSDPModule):
        undo.callback(setattr, part, "__class__", type(part))
        own_class: Any = next(cls for cls in type(part).__mro__ if not issubclass(cls, FSDPModule))
        part.__class__ = own_class
    undo.callback(own.update, {name: own.pop(name) for name in _ADDED & own.keys()})
    hooks = [own[name] for name in _HOOKS if isinstance(own.get(name), dict)]
    taken = {number for of_kind in hooks for number, hook in of_kind.items() if _shards(hook)}
    for of_kind in hooks if taken else ():
        undo.callback(_bring_back, of_kind, dict(of_kind), taken)
        for number in taken & of_kind.keys():
            del of_kind[number]


def _shards(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_WHO_SHARDS)


def _bring_back(hooks: dict[int, Any], before: Mapping[int, Any], taken: set[int]) -> None:
    # In their order, beside what was registered or removed meanwhile.
    now = dict(hooks)
    hooks.clear()
    hooks.update({number: hook for number, hook in before.items() if number in taken or number in now})
    hooks.update(now)


def let_be_copied(modules: Iterable[nn.Module], added: Iterable[str]) -> None:
    """Has ``copy.deepcopy`` of modules give ones of their own class that hold shards, as the originals do.

    A copy gathers nothing: it cannot be called. Neither this nor copying is collective. Only these objects can be
    copied; FSDP2 refuses all others of their classes.

    Args:
        modules: Sharded by FSDP2.
        added: Names of attributes that they have for being sharded, which copies have not.
    """
    _ADDED.update(added, {"__deepcopy__"})
    for module in modules:
        vars(module)["__deepcopy__"] = functools.partial(_copy, weakref.ref(module))


def _copy(original: "weakref.ref[nn.Module]", memo: dict[int, Any]) -> nn.Module:
    module = cast(nn.Module, original())
    for parameter in module.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and id(gradient) not in memo:
            # One that lies behind others in a buffer torch would copy by memory that a DTensor has not.
            memo[id(gradient)] = gradient.clone()
    with plain(module):
        twin = copy.deepcopy(module, memo)
    let_whole_states_be_loaded(twin)
    return twin
