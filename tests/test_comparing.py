"""What compares for the other tests: a NaN must not pass it, nor nothing at all, nor another shape."""

import math
from typing import Any

import pytest
import torch

from tests.comparing import assert_same, distance, worst

NAN = math.nan
ONE = torch.tensor([1.0, 2.0])


def test_the_worst_of_nested_values_and_the_distance_of_two() -> None:
    for values in ([1e-7, NAN], [NAN, 1e-7], [[1e-7], {"a": (0.5, torch.tensor([0.1, NAN]))}], [1.0, math.inf]):
        assert worst(values) == worst(*values) == math.inf
    assert worst([[1e-7, 0.5], {"a": torch.tensor([0.1, 0.25])}]) == 0.5
    assert distance([ONE, {"a": 3}], [ONE + torch.tensor([0.0, 0.5]), {"a": 3.25}]) == 0.5
    assert distance([ONE, torch.tensor(NAN)], [ONE, torch.tensor(NAN)]) == math.inf
    nothings: list[Any] = [[], [None], {"a": []}, torch.zeros(0)]
    for nothing in nothings:
        with pytest.raises(AssertionError, match="nothing to compare"):
            worst(nothing)
    with pytest.raises(AssertionError):
        distance(ONE, ONE[:1])


def test_what_differs_is_not_the_same() -> None:
    expected = {"a": ONE, "b": [1, "x"], "c": None}
    assert_same({"a": ONE.clone(), "b": [1, "x"], "c": None}, expected)
    for change in ({"a": ONE + 1e-6}, {"a": ONE.double()}, {"b": [1, "y"]}, {"b": [1]}, {"a": ONE * NAN}, {"d": None}):
        with pytest.raises(AssertionError):
            assert_same({**expected, **change}, expected)
    assert_same([ONE * (1 + 1e-6)], [ONE], rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_same([ONE * NAN], [ONE * NAN], rtol=1e-5)
    matrix = torch.ones(2, 3)
    with pytest.raises(AssertionError, match=r"/0/a: .*[Ss]tride"):
        assert_same([{"a": matrix.t().contiguous().t()}], [{"a": matrix}], as_stored=True)
