"""Sharded modules as plain ones: with whole parameters for a while, or as deep copies, which FSDP2 refuses."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.fsdp.state import let_whole_states_be_loaded, shard_like

_ADDED: set[str] = set()
"""Names of attributes that sharding has added to modules."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that are called instead of ``forward``."""

_OF_PROGRAM = "of_program"
"""The name of an attribute of registered methods: what the program had set on the object, or None."""

_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]
_WHO_CUTS = "torch.distributed.tensor."
_WHO_SHARDS = ("torch.distributed.fsdp.", f"{__name__.partition('.')[0]}.")


@contextmanager
def shown_whole(module: nn.Module) -> Iterator[None]:
    """Within it, a module is a plain one with whole parameters, in the dtype in which they are kept.

    Collective at its beginning: an all-gather of each parameter. Within it, nothing is sent. When it ends, each rank
    copies its part of each parameter into its shard.

    Args:
        module: Sharded by FSDP2. It must not be within a step.

    Raises:
        ValueError: At its end: a parameter was removed, or has another shape or dtype.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    registered = [
        (owner, own_name, f"{prefix}.{own_name}".lstrip("."), parameter)
        for prefix, owner in module.named_modules()
        for own_name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    shown: dict[Tensor, nn.Parameter] = {}
    for _, _, name, parameter in registered:
        if parameter not in shown:
            shown[parameter] = _whole(parameter, name)
    with plain(module):
        try:
            for owner, own_name, _, parameter in registered:
                setattr(owner, own_name, shown[parameter])
            yield
        finally:
            _restore(registered)


def _whole(parameter: Any, name: str) -> nn.Parameter:
    whole = nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)
    vars(whole).update(vars(parameter))

    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            f"A backward came to {name!r} as `full_parameters()` shows it, whose gradient no optimizer would see. For a"
            " training compute the loss outside of it. For a look within it, take `torch.autograd.grad`."
        )

    if whole.requires_grad:
        whole.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    return whole


@torch.no_grad()
def _restore(registered: Iterable[tuple[nn.Module, str, str, DTensor]]) -> None:
    written: dict[DTensor, Any] = {}
    lost = []
    for owner, own_name, name, parameter in registered:
        now: Any = getattr(owner, own_name, None)
        first = written.setdefault(parameter, now)
        fits = isinstance(now, nn.Parameter) and now.shape == parameter.shape and now.dtype == parameter.dtype
        if not fits or (first is not now and not torch.equal(first, now)):
            lost.append(name)
        setattr(owner, own_name, parameter)
    if lost:
        raise ValueError(
            f"Within `full_parameters()` {listed(lost)} got another shape or dtype, or another value than what it is"
            " tied to, or was removed. The shards are as they were before. Change a copy of the module instead, or of"
            " its `state_dict()`."
        )
    for parameter, value in written.items():
        local(parameter).copy_(local(shard_like(value.detach(), parameter)))
        parameter.requires_grad_(value.requires_grad)


@contextmanager
def plain(module: nn.Module, keeps_cut: bool = False) -> Iterator[None]:
    """Within it, a module and all below it have their own classes, without the additions of sharding.

    Parameters do not change, and nothing is gathered. You can call a module if its parameters are whole.

    Args:
        module: The module.
        keeps_cut: Whether tensor-parallel layers stay cut.
    """
    added = _WHO_SHARDS if keeps_cut else (*_WHO_SHARDS, _WHO_CUTS)
    with ExitStack() as undo:
        for part in list(module.modules()):
            own = vars(part)
            if isinstance(part, FSDPModule):
                undo.callback(setattr, part, "__class__", type(part))
                own_class: Any = next(cls for cls in type(part).__mro__ if not issubclass(cls, FSDPModule))
                part.__class__ = own_class
            undo.callback(own.update, {name: own.pop(name) for name in _ADDED & own.keys()})
            undo.callback(own.update, unregister_steps(part))
            for hooks in [own[name] for name in _HOOKS if isinstance(own.get(name), dict)]:
                undo.callback(_restore_hooks, hooks, dict(hooks))
                for number in [number for number, hook in hooks.items() if _is_of(hook, added)]:
                    del hooks[number]
        yield


def _is_of(hook: Any, modules: tuple[str, ...]) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(modules)


def _restore_hooks(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    # In their order, with the hooks that were registered or removed meanwhile.
    now = dict(hooks)
    hooks.clear()
    hooks.update(
        {number: hook for number, hook in before.items() if number in now or _is_of(hook, (*_WHO_SHARDS, _WHO_CUTS))}
    )
    hooks.update(now)


def let_be_copied(modules: Iterable[nn.Module], added: Iterable[str]) -> None:
    """Makes ``copy.deepcopy`` of sharded modules work. The copies have the modules' own classes, and hold shards.

    A copy gathers nothing: it cannot be called. Copies have no gradients. Neither this nor copying is collective.

    Args:
        modules: Sharded by FSDP2, which has given each another class.
        added: Names of attributes that sharding has added. Copies do not have them.
    """
    _ADDED.update(added)
    for module in modules:
        cast(Any, type(module)).__deepcopy__ = _copy


def register_steps(module: nn.Module) -> None:
    """Makes FSDP2 gather the root's parameters in a LightningModule's steps, as in ``forward``. Not collective."""
    for name in _STEPS:
        of_program = vars(module).get(name)
        register_fsdp_forward_method(module, name)
        setattr(vars(module)[name].__func__, _OF_PROGRAM, of_program)


def unregister_steps(module: nn.Module) -> dict[str, Any]:
    """Restores the steps that a program has set on the object. Not collective.

    Returns:
        The registered ones by their names.
    """
    own = vars(module)
    functions = {name: getattr(own[name], "__func__", None) for name in _STEPS if name in own}
    registered = {name: own.pop(name) for name, function in functions.items() if hasattr(function, _OF_PROGRAM)}
    of_program = {name: getattr(functions[name], _OF_PROGRAM) for name in registered}
    own.update({name: step for name, step in of_program.items() if step is not None})
    return registered


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # torch would copy a gradient that lies behind others in a buffer by its memory. A DTensor has none.
    memo.update({id(parameter.grad): None for parameter in module.parameters() if parameter.grad is not None})
    with plain(module):
        twin = copy.deepcopy(module, memo)
    let_whole_states_be_loaded(twin)
    return twin
