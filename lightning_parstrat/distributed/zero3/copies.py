"""Sharded modules as plain ones: for a while, or as deep copies, which FSDP2 refuses, or within what is saved."""

import copy
import functools
import hashlib
import io
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parstrat.distributed.comm.agreement import all_have_same
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.zero3.held_parameters import current_parameter
from lightning_parstrat.distributed.zero3.state import gather, let_whole_states_be_loaded

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


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and notes them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    @override
    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        value = current_parameter(value)
        self.tensors[id(value)] = value
        return id(value)


class _Unpickler(pickle.Unpickler):
    """Puts tensors where others were."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


@torch.no_grad()
def with_plain_modules(
    value: Any, module: nn.Module, state: Mapping[str, Any], keep: bool, control: Collectives
) -> Any:
    """What is to be saved, with plain modules on the host in the place of sharded ones, wherever it holds them.

    Collective: one small reduction, and an all-gather of each parameter of these modules.

    Args:
        value: Is left as it is; holds the same on all ranks.
        module: Sharded by FSDP2; parts of it may be in there.
        state: What else is saved: whole tensors by name. Equal tensors share their memory.
        keep: Whether this rank wants it.
        control: Compares what ranks hold.

    Raises:
        ValueError: Ranks hold different parts of the module; raised on all of them.
    """
    content = io.BytesIO()
    pickler = _Pickler(content)
    with plain(module):
        try:
            pickler.dump(value)
        except Exception:
            # Whoever saves it says so.
            pickler.tensors.clear()
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    shards = [names.get(tensor, "") for tensor in pickler.tensors.values() if isinstance(tensor, DTensor)]
    digest = int.from_bytes(hashlib.sha256(repr(shards).encode()).digest()[:7], "big")
    if not all_have_same(digest, control):
        raise ValueError(
            "The hyperparameters of some ranks hold other parts of the module than those of others. Save the same on"
            " all ranks, or leave them out: `self.save_hyperparameters(ignore=[...])`."
        )
    if not shards:
        return value
    whole = {}
    for number, tensor in pickler.tensors.items():
        gathered = gather(tensor, keep)
        if keep:
            same = state.get(names.get(tensor, ""))
            if type(same) is Tensor and same.dtype == gathered.dtype and torch.equal(same, gathered):
                gathered = same
            is_parameter = isinstance(tensor, nn.Parameter)
            whole[number] = nn.Parameter(gathered, tensor.requires_grad) if is_parameter else gathered
    content.seek(0)
    return _Unpickler(content, whole).load() if keep else value
