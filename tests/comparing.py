"""Comparisons that no NaN passes. Python's ``max`` drops one that comes late: ``max([0.1, nan])`` is 0.1."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def worst(*values: Any) -> float:
    """The largest number in nested values, which must hold some; infinite where one of them is NaN."""
    numbers = [number for tensor in tensors_in(values) for number in tensor.double().reshape(-1).tolist()]
    assert numbers, "there is nothing to compare"
    return math.inf if any(map(math.isnan, numbers)) else max(numbers)


def distance(actual: Any, expected: Any) -> float:
    """How far nested values are from each other that must be built alike: the largest absolute difference.

    Infinite where there is a NaN in either of them, or an infinity.
    """
    ours, theirs = tensors_in(actual), tensors_in(expected)
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.numel()]
    assert pairs, "there is nothing to compare"
    return worst([(_wide(one) - _wide(other)).abs().max() for one, other in pairs])


def tensors_in(value: Any) -> list[Tensor]:
    """All numbers in nested values, in their order; what is neither a number nor holds any is left out."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, (int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def assert_same(actual: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0, *, as_stored: bool = False) -> None:
    """Nested values have the same keys and the same values: by default to the last bit.

    Args:
        actual: What is looked at.
        expected: What it is to be.
        rtol: How much floating numbers may differ, relative to what is expected.
        atol: How much they may differ beside that.
        as_stored: Whether keys must be in the same order, too, and tensors lie in memory alike.
    """
    _assert_same(actual, expected, rtol, atol, as_stored, "")


def _assert_same(actual: Any, expected: Any, rtol: float, atol: float, as_stored: bool, where: str) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        torch.testing.assert_close(
            actual.detach(),
            expected.detach(),
            rtol=rtol,
            atol=atol,
            check_stride=as_stored,
            msg=lambda message: f"{where}: {message}",
        )
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected) if as_stored else actual.keys() == expected.keys(), where
        for key in expected:
            _assert_same(actual[key], expected[key], rtol, atol, as_stored, f"{where}/{key}")
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _assert_same(one, other, rtol, atol, as_stored, f"{where}/{index}")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=rtol, abs=atol), where
    else:
        assert actual == expected, where
