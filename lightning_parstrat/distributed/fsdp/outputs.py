"""What sharded blocks return and leave, so that a program sees what it sees of blocks that are not sharded.

FSDP2 frees a block's parameters after its forward. A view of a parameter would then point to freed memory. A backward
gathers parameters again by hooks on the outputs. An operation that changes a view in place drops these hooks. If
results are in an attribute or in another object, there are no hooks. And FSDP2 gives a block copies of lists,
dictionaries and dataclasses that hold tensors with gradients. What the block adds would be lost with the copy.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.torch_compat import gathered_by_fsdp, is_view


class _Lent(NamedTuple):
    """A container that a block was given, with its content before the call, and as the block has got it."""

    container: Any
    before: dict[Any, Any]
    lent: dict[Any, Any]


class BlockCalls:
    """Hooks around the calls of a sharded block. Not collective.

    A block gets the caller's own lists, dictionaries and dataclasses, with FSDP2's tensors in them until it ends. Views
    with gradients that a block returns, and its parameters, are copied: that takes the bytes of these tensors. If its
    outputs show no gradient, or it has changed its arguments, a block stays gathered until the backward has ended.

    Args:
        block: Sharded by FSDP2. Tensors alone, and those in dictionaries, lists and tuples are copied.
        frees: Whether FSDP2 frees its parameters after forward.
        keep: Called if the block is to stay gathered.
    """

    def __init__(self, block: Any, frees: bool, keep: Callable[[], None]) -> None:
        self._block, self._frees, self._keep = block, frees, keep
        self._gathered = [tensor for _, tensor in gathered_by_fsdp(block)]
        self._given: Any = None
        self._lent: list[_Lent] = []
        block.set_reshard_after_forward(frees, recurse=False)

    def register(self) -> Iterator[RemovableHandle]:
        """Registers the hooks. FSDP2's own are not compiled, either."""
        block = self._block
        hidden: Callable[[Any], Any] = torch.compiler.disable
        yield block.register_forward_pre_hook(hidden(self._note), prepend=True, with_kwargs=True)
        yield block.register_forward_pre_hook(hidden(self._lend), with_kwargs=True)
        # Before FSDP2's own, which frees parameters.
        yield block.register_forward_hook(hidden(self._end), prepend=True, with_kwargs=True)

    def _note(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        # An exception may have ended the last call.
        self._give_back()
        # FSDP2 copies what holds gradients.
        self._given = (args, kwargs) if torch.is_grad_enabled() else None

    def _give_back(self) -> bool:
        has_changed = [_give_back(one) for one in self._lent]
        self._lent.clear()
        return any(has_changed)

    def _lend(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._given is None:
            return None
        (own_args, own_kwargs), self._given = self._given, None
        own = {name: _lent(own_kwargs.get(name), one, self._lent) for name, one in kwargs.items()}
        return _lent(own_args, args, self._lent), own

    def _end(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        has_changed = self._give_back()
        if torch.is_grad_enabled():
            hides = has_changed or not _shows_gradient(output)
            # A frozen block's parameters are needed for the gradients of its arguments.
            keeps = hides and _shows_gradient((self._gathered, args, kwargs))
            if keeps:
                self._keep()
            self._block.set_reshard_after_forward(self._frees and not keeps, recurse=False)
        freed = set(map(_address, self._gathered)) - {0}

        def with_own_memory(tensor: Tensor) -> Tensor:
            # Hooks are on tensors with gradients alone.
            is_hooked_view = tensor.requires_grad and is_view(tensor)
            return tensor.clone() if is_hooked_view or _address(tensor) in freed else tensor

        return replace_leaves(output, with_own_memory)


def _address(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0
    try:
        return local(tensor).untyped_storage().data_ptr()
    except NotImplementedError:
        # Of a transform of `torch.func`.
        return 0


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _content(container: Any) -> dict[Any, Any] | None:
    """What a container holds, by places. None of what is no container."""
    if _is_dataclass(container):
        return {one.name: getattr(container, one.name) for one in fields(container) if hasattr(container, one.name)}
    if isinstance(container, set):
        return {id(one): one for one in container}
    if isinstance(container, (list, deque)):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else None


def _set(container: Any, place: Any, value: Any) -> None:
    if not _is_dataclass(container):
        container[place] = value
        return
    try:
        setattr(container, place, value)
    except FrozenInstanceError:
        object.__setattr__(container, place, value)


def _lent(own: Any, given: Any, lent: list[_Lent]) -> Any:
    """A container of the caller with FSDP2's tensors in it. Aliases and closures then see what a block adds.

    Args:
        own: What the caller has given.
        given: What FSDP2 has made of it. It is returned if it is no container, or has another form.
        lent: Each container is added to it once.
    """
    if type(own) is not type(given):
        return given
    if isinstance(own, tuple):
        parts = [_lent(*pair, lent) for pair in zip(own, given, strict=False)]
        if len(own) != len(given) or all(one is other for one, other in zip(parts, given, strict=True)):
            return given
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    before, now = _content(own), _content(given)
    if before is None or now is None:
        return given
    if any(own is one.container for one in lent):
        return own
    if before.keys() != now.keys():
        return given
    one = _Lent(own, before, {})
    lent.append(one)
    for place, value in now.items():
        one.lent[place] = _lent(before[place], value, lent)
        if one.lent[place] is not before[place]:
            _set(own, place, one.lent[place])
    return own


def _give_back(one: _Lent) -> bool:
    """Gives a container its own tensors again. Returns whether the block has changed it otherwise."""
    own = {id(value): one.before[place] for place, value in one.lent.items() if value is not one.before[place]}
    now = _content(one.container) or {}
    for place, value in now.items():
        if id(value) in own:
            _set(one.container, place, own[id(value)])
    return now.keys() != one.lent.keys() or any(now[place] is not one.lent[place] for place in now)


def _shows_gradient(output: Any) -> bool:
    """Whether FSDP2 finds a tensor with a gradient."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, (set, deque)):
        return False
    parts = output if isinstance(output, tuple) else (_content(output) or {}).values()
    return any(map(_shows_gradient, parts))
