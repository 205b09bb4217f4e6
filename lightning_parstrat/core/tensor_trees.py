"""Tensors in nested dictionaries, lists, tuples and deques, such as checkpoints."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""The keys and positions that lead to a value."""


class Leaf(NamedTuple):
    """A tensor, and its path in the tree."""

    path: Path
    tensor: Tensor


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values. NaN is like NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def leaves(tree: Any, path: Path = ()) -> Iterator[Leaf]:
    """All tensors of a tree."""
    if isinstance(tree, Tensor):
        yield Leaf(path, tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple, deque)):
        for position, value in enumerate(tree):
            yield from leaves(value, (*path, position))


def replace_leaves(tree: Any, replacement: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a tree with other tensors. Parts in which all tensors stay the same are not copied.

    Args:
        tree: Is not changed.
        replacement: Returns the replacement of a tensor, or the tensor itself.
    """
    if isinstance(tree, Tensor):
        return replacement(tree)
    if isinstance(tree, dict):
        new = {key: replace_leaves(value, replacement) for key, value in tree.items()}
        if all(new[key] is value for key, value in tree.items()):
            return tree
        # A shallow copy keeps the type and its attributes, such as a state dict's `_metadata`.
        result = copy.copy(tree)
        for key, value in new.items():
            # One by one: Hugging Face's outputs have no `update`.
            result[key] = value
        return result
    if isinstance(tree, (list, tuple, deque)):
        items = [replace_leaves(value, replacement) for value in tree]
        if all(item is value for item, value in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, deque):
            return deque(items, tree.maxlen)
        # A named tuple takes its items as arguments, not as one sequence.
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def in_storage_order(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor as 1-D, with its elements in the order in which other strides place them. A view, if they are its own.

    Args:
        tensor: The tensor.
        strides: By default its own. If it is not dense, its elements are then row by row.
    """
    strides = storage_strides(tensor) if strides is None else strides
    if tensor.stride() != tuple(strides):
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def storage_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor. If it is not dense, those of a row-major one of its shape."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def with_narrow_storage(tensor: Tensor) -> Tensor:
    """A tensor on the same memory, with a storage no larger than itself. Saving it saves nothing else."""
    storage = tensor.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    extent = (last + 1) * tensor.itemsize if tensor.numel() else 0
    if extent == storage.nbytes():
        return tensor
    # `torch.save` writes entire storages: with a view of a bucket it would write the bucket.
    narrow = storage[start : start + extent]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(narrow, 0, tensor.shape, tensor.stride())


def with_own_storage(value: Any, storages: set[int]) -> Any:
    """A copy of a tree in which tensors that lie in ``storages`` have storage that holds nothing else.

    No memory is copied: the new tensors use the same memory.

    Args:
        value: What is to be saved.
        storages: Addresses of the buckets' storages.
    """
    narrowed: dict[tuple[Any, ...], Tensor] = {}

    def narrow(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() not in storages:
            return tensor
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in narrowed:
            # One for all that are the same: tied parameters are written once.
            narrowed[place] = with_narrow_storage(tensor.detach())
        return narrowed[place]

    return replace_leaves(value, narrow)
