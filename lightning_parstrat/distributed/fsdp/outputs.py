"""What sharded blocks return and leave, so that a program sees what it sees of blocks that are not sharded.

FSDP2 frees a block's parameters after its forward. A view of a parameter would then point to freed memory. A backward
gathers parameters again by hooks on the outputs. An operation that changes a view in place drops these hooks. If
results are in an attribute or in another object, there are no hooks. And FSDP2 gives a block copies of lists,
dictionaries and dataclasses that hold tensors with gradients. What the block adds would be lost with the copy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.torch_compat import gathered_by_fsdp, is_view


class BlockCalls:
    """Hooks around the calls of a sharded block. Not collective.

    Views that a block returns, and its parameters, are copied: that takes the bytes of these tensors. What a block adds
    to its arguments, their owners see. A trained block whose outputs show no gradient, or that has changed its
    arguments, stays gathered until the backward has left it.

    Args:
        block: Sharded by FSDP2. Tensors alone, and those in dictionaries, lists and tuples are copied.
        frees: Whether FSDP2 frees its parameters after forward.
    """

    def __init__(self, block: Any, frees: bool) -> None:
        self._block, self._frees = block, frees
        self._gathered = [tensor for _, tensor in gathered_by_fsdp(block)]
        self._own: list[Any] = []
        """The lists, dictionaries and dataclasses that the block was given."""
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []
        """These with what FSDP2 has made of them, which may be copies, and with the content of that."""
        block.set_reshard_after_forward(frees, recurse=False)

    def register(self) -> Iterator[RemovableHandle]:
        """Registers the hooks. FSDP2's own are not compiled, either."""
        block = self._block
        hidden: Callable[[Any], Any] = torch.compiler.disable
        yield block.register_forward_pre_hook(hidden(self._note_own), prepend=True, with_kwargs=True)
        yield block.register_forward_pre_hook(hidden(self._note_copies), with_kwargs=True)
        # Before FSDP2's own, which frees parameters.
        yield block.register_forward_hook(hidden(self._end), prepend=True)

    def _note_own(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        # FSDP2 copies what holds gradients.
        self._own = [*_containers((*args, *kwargs.values()))] if torch.is_grad_enabled() else []

    def _note_copies(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*_containers((*args, *kwargs.values()))] if self._own else []
        pairs = zip(self._own, given, strict=False) if [*map(type, self._own)] == [*map(type, given)] else ()
        self._copies = [(own, copy, _content(copy)) for own, copy in pairs]
        self._own = []

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        changed = [pair for pair in self._copies if not _are_same(_content(pair[1]), pair[2])]
        for own, copy, before in changed:
            if own is not copy:
                _write_back(own, copy, before)
        self._copies = []
        if self._frees and torch.is_grad_enabled():
            shows_all = _shows_gradient(output) and not changed
            is_trained = any(one.requires_grad for one in self._gathered)
            self._block.set_reshard_after_forward(shows_all or not is_trained, recurse=False)
        freed = set(map(_address, self._gathered)) - {0}

        def with_own_memory(tensor: Tensor) -> Tensor:
            return tensor.clone() if is_view(tensor) or _address(tensor) in freed else tensor

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


def _containers(tree: Any) -> Iterator[Any]:
    """The lists, dictionaries and dataclasses of a tree, from the outside to the inside."""
    if isinstance(tree, (list, dict)) or _is_dataclass(tree):
        yield tree
    if isinstance(tree, (list, dict, tuple)) or _is_dataclass(tree):
        for part in [*tree] if isinstance(tree, tuple) else [*_content(tree).values()]:
            yield from _containers(part)


def _content(container: Any) -> dict[Any, Any]:
    if _is_dataclass(container):
        return {field.name: getattr(container, field.name) for field in fields(container)}
    return dict(container if isinstance(container, dict) else enumerate(container))


def _are_same(some: dict[Any, Any], others: dict[Any, Any]) -> bool:
    return some.keys() == others.keys() and all(some[key] is others[key] for key in some)


def _write_back(own: Any, copy: Any, before: dict[Any, Any]) -> None:
    """Gives a container what was added to its copy, and not the copies of what it has."""
    known = {id(before[key]): value for key, value in _content(own).items() if key in before}
    now = {key: known.get(id(value), value) for key, value in _content(copy).items()}
    if _is_dataclass(own):
        for name, value in now.items():
            setattr(own, name, value)
    elif isinstance(own, dict):
        own.clear()
        own.update(now)
    else:
        own[:] = now.values()


def _shows_gradient(output: Any) -> bool:
    """Whether FSDP2 finds a tensor with a gradient."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, (list, tuple, dict)) or _is_dataclass(output):
        return any(map(_shows_gradient, output if isinstance(output, tuple) else _content(output).values()))
    return False


@contextmanager
def explained_errors() -> Iterator[None]:
    """Within it, torch's error for parameters that a backward did not gather says what to do. Not collective."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise RuntimeError(
            "A backward has come to a block of `zero3_custom` whose parameters were not gathered. It gathers them when"
            " it comes to a tensor that the block has returned, alone or in dictionaries, lists, tuples or"
            " dataclasses. A backward through gradients in `training_step` cannot gather them. Set"
            " `reshard_after_forward=False`, or leave the block to the root."
        ) from error
