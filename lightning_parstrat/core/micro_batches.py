"""A batch cut into micro-batches along its first dimension, and what a step returns for each, joined again."""

import copy
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_parstrat.core.wording import counted, listed

_WHOLE = (str, bytes, int, float, complex, Enum, torch.dtype, torch.device, type(None))
"""The types that every micro-batch gets whole."""


def count_samples(batch: Any) -> int:
    """The size of the first dimension of a batch's tensors.

    Raises:
        ValueError: The batch has no tensor with a dimension.
    """
    return _deciding(batch).size


class _Deciding(NamedTuple):
    """The tensor that decides how many samples a batch has.

    Attributes:
        size: Its first dimension.
        lengths: The lengths of the lists and tuples around it.
    """

    size: int
    lengths: tuple[int, ...]


def _deciding(batch: Any) -> _Deciding:
    # Of tensors in fewer lists and dictionaries first: a list may have one for each sample.
    level: list[tuple[Any, tuple[int, ...]]] = [(batch, ())]
    while level:
        for tree, lengths in level:
            if isinstance(tree, Tensor) and tree.dim():
                return _Deciding(tree.size(0), lengths)
        within = []
        for tree, lengths in level:
            if isinstance(tree, Mapping):
                within += [(one, lengths) for one in tree.values()]
            elif isinstance(tree, (list, tuple)):
                within += [(one, (*lengths, len(tree))) for one in tree]
        level = within
    raise ValueError(
        f"A batch of type {type(batch).__name__} has no tensor whose first dimension counts samples, so it cannot be"
        " cut into micro-batches. Let the collate function return tensors in dictionaries, lists or tuples."
    )


def check_samples(batch: Any, batch_sizes: Collection[int]) -> None:
    """Raises if the first dimension of a batch's tensors is not its samples, as far as sizes show it.

    Args:
        batch: The first of an epoch, which has fewer samples than others only if it is the last one, too.
        batch_sizes: How many samples the loaders' batches have. Empty if that is not known.

    Raises:
        ValueError: There are more than in any batch. Or a list has one item for each sample, and parts were expected.
    """
    size, lengths = _deciding(batch)
    if not batch_sizes or size in batch_sizes:
        return
    if size > max(batch_sizes) or not set(batch_sizes).isdisjoint(lengths):
        raise ValueError(
            f"The first dimension of a batch's tensors is {size}, and the loader's batches have"
            f" {listed(sorted(map(str, batch_sizes)))} samples. So the batch cannot be cut into micro-batches. Let the"
            " collate function return tensors whose first dimension is the samples, as `torch.stack` does."
        )


def cut_batch(batch: Any, micro_batches: int) -> tuple[list[Any], list[int]]:
    """Cuts a batch into micro-batches. The first ones have one sample more if the division leaves a rest.

    Args:
        batch: Tensors in dictionaries, lists and tuples. A list with an item for each sample is cut, too.
        micro_batches: How many.

    Returns:
        The micro-batches, whose tensors are views, and the number of samples of each.

    Raises:
        ValueError: There are fewer samples than micro-batches. Or a part of the batch cannot be cut.
    """
    samples = count_samples(batch)
    if samples < micro_batches:
        raise ValueError(
            f"A batch of {counted(samples, 'sample')} cannot be cut into microbatches={micro_batches}. Set at most"
            " as many micro-batches as the smallest batch has samples, or `drop_last=True` in the loader."
        )
    whole, rest = divmod(samples, micro_batches)
    sizes = [whole + (number < rest) for number in range(micro_batches)]
    begins = [sum(sizes[:number]) for number in range(micro_batches)]
    parts = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    return [_cut(batch, samples, part, is_batch=True) for part in parts], sizes


def _cut(tree: Any, samples: int, part: slice, is_batch: bool = False) -> Any:
    if isinstance(tree, Tensor):
        if tree.dim() and tree.size(0) != samples:
            raise ValueError(
                f"A tensor of shape {tuple(tree.shape)} in a batch of {samples} samples cannot be cut into"
                " micro-batches: its first dimension is not the samples. Make it so in the collate function, or leave"
                " it to the module."
            )
        return tree[part] if tree.dim() else tree
    if isinstance(tree, Mapping):
        cut = copy.copy(tree)
        for key, value in tree.items():
            cut[key] = _cut(value, samples, part)  # type: ignore[index]
        return cut
    if isinstance(tree, (list, tuple)):
        # A batch has parts, such as images and labels, even if there are as many samples.
        if not is_batch and _lists_samples(tree, samples):
            return tree[part]
        items = [_cut(value, samples, part) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, _WHOLE):
        return tree
    raise ValueError(
        f"A {type(tree).__name__} in a batch cannot be cut into micro-batches. Let the collate function return tensors"
        " in dictionaries, lists or tuples."
    )


def _has(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and tensor.size(0) == samples


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output that one step on the whole batch would have.

    Tensors, arrays and lists with an item for each sample are put one after the other. Of other numbers, it is the mean
    over samples.

    Args:
        outputs: What a step has returned for each micro-batch.
        sizes: The number of samples of each.

    Raises:
        ValueError: The outputs cannot be joined.
    """
    first = outputs[0]
    if all(isinstance(one, np.ndarray) and one.dtype.kind in "biufc" for one in outputs):
        return join_outputs([torch.from_numpy(np.ascontiguousarray(one)) for one in outputs], sizes).numpy()
    if all(isinstance(one, Tensor) for one in outputs):
        if first.dim() and all(_has(one, size) for one, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if all(one.shape == first.shape for one in outputs):
            return mean_over(outputs, sizes)
    elif isinstance(first, Mapping):
        # Outputs of Hugging Face's models have attributes, too.
        joined = copy.copy(first) if isinstance(first, dict) else {}
        for key in first:
            joined[key] = join_outputs([one[key] for one in outputs], sizes)
        return joined
    elif isinstance(first, (list, tuple)):
        # A step returns a tuple of parts, and a list of samples.
        of_text = type(first) is tuple and all(isinstance(item, str) for one in outputs for item in one)
        lengths = [*map(len, outputs)]
        # Parts are as many in each micro-batch.
        are_samples = lengths == [*sizes] and (len({*sizes}) > 1 or all(map(_lists_samples, outputs, sizes)))
        if (of_text or isinstance(first, list)) and are_samples:
            return type(first)(item for one in outputs for item in one)
        if len({*lengths}) == 1:
            items = [join_outputs(position, sizes) for position in zip(*outputs, strict=True)]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    elif all(_are_equal(one, first) for one in outputs):
        return first
    elif isinstance(first, (int, float)) and not isinstance(first, bool):
        return mean_over([torch.tensor(float(one), dtype=torch.float64) for one in outputs], sizes).item()
    raise ValueError(
        f"A step has returned values of type {type(first).__name__} that differ between micro-batches, and cannot be"
        " joined. Return tensors whose first dimension is the samples, or numbers."
    )


def _are_equal(one: Any, other: Any) -> bool:
    # Objects with tensors may compare these one by one.
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False


def has_no_mean(output: Any, samples: int) -> bool:
    """Whether what a step returns has counts, or tensors that do not begin with its samples.

    The mean over micro-batches is not what one step would return then.
    """
    if isinstance(output, Tensor):
        return not _has(output, samples) if output.dim() else not output.is_floating_point()
    if isinstance(output, Mapping):
        return any(has_no_mean(one, samples) for one in output.values())
    parts = output if isinstance(output, (list, tuple)) and len(output) != samples else ()
    return type(output) is int or any(has_no_mean(one, samples) for one in parts)


def _lists_samples(items: Sequence[Any], samples: int) -> bool:
    """Whether there is an item for each sample, and not a few parts that have all samples."""
    of_all = [isinstance(one, Tensor) and _has(one, samples) for one in items]
    kinds = {(type(one), one.dim() if isinstance(one, Tensor) else 0) for one in items}
    return len(items) == samples and not (all(of_all) or (any(of_all) and len(kinds) > 1))


def mean_over(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of tensors of one shape, in fp32 at least. Without any weight, the first of them."""
    # 0 times NaN is NaN.
    known = [pair for pair in zip(values, weights, strict=True) if pair[1]] or [(values[0], 1)]
    values, weights = [value for value, _ in known], [weight for _, weight in known]
    total = sum(weights)
    wide = [value.detach().double() if value.dtype == torch.float64 else value.detach().float() for value in values]
    weighed = [value * (weight / total) for value, weight in zip(wide, weights, strict=True)]
    return torch.stack(weighed).sum(0)


def signature(tree: Any) -> Any:
    """A key for the shapes of a step's tensors: shapes, dtypes and whole numbers of its batch."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, Mapping):
        return tuple((key, signature(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(map(signature, tree))
    return tree if isinstance(tree, int) else None
