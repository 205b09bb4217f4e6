"""What compares for the other tests: a NaN must not pass it, nor nothing at all, nor another shape."""

import math
from typing import Any

import pytest
import torch

from tests.comparing import assert_same, distance, worst

NAN = math.nan
ONE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e-7, NAN], math.inf),
        ([NAN, 1e-7], math.inf),
        ([[1e-7], {"a": (0.5, torch.tensor([0.1, NAN]))}], math.inf),
        ([[1e-7, 0.5], {"a": torch.tensor([0.1, 0.25])}], 0.5),
        ([-3.0, "not a number", None], -3.0),
        ([1.0, math.inf], math.inf),
    ],
)
def test_the_worst_of_nested_values(values: Any, expected: float) -> None:
    assert worst(values) == expected
    assert worst(*values) == expected


@pytest.mark.parametrize("nothing", [[], [None], {"a": []}, torch.zeros(0)])
def test_nothing_is_not_compared(nothing: Any) -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        worst(nothing)
    with pytest.raises(AssertionError, match="nothing to compare"):
        distance(nothing, nothing)


def test_distances() -> None:
    assert distance([ONE, {"a": 3}], [ONE + torch.tensor([0.0, 0.5]), {"a": 3.25}]) == 0.5
    assert distance(ONE, ONE.clone()) == 0.0
    assert distance([ONE, torch.tensor(NAN)], [ONE, torch.tensor(NAN)]) == math.inf
    assert distance([torch.tensor(NAN), ONE], [torch.tensor(1.0), ONE]) == math.inf
    assert distance(torch.tensor(math.inf), torch.tensor(math.inf)) == math.inf
    with pytest.raises(AssertionError):
        distance([ONE], [ONE, ONE])
    with pytest.raises(AssertionError):
        distance(ONE, ONE[:1])


def test_whatever_differs_is_not_the_same() -> None:
    expected = {"a": ONE, "b": [1, "x"], "c": None}
    assert_same({"a": ONE.clone(), "b": [1, "x"], "c": None}, expected)
    for change in ({"a": ONE + 1e-6}, {"a": ONE.double()}, {"b": [1, "y"]}, {"b": [1]}, {"a": ONE * NAN}, {"d": None}):
        with pytest.raises(AssertionError):
            assert_same({**expected, **change}, expected)


def test_what_is_the_same_but_for_rounding_or_how_it_is_stored() -> None:
    assert_same([ONE * (1 + 1e-6)], [ONE], rtol=1e-5)
    for nan in (NAN, ONE * NAN):
        with pytest.raises(AssertionError):
            assert_same([nan], [nan], rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_same([ONE * NAN], [ONE * NAN], rtol=1e-5)
    assert_same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    with pytest.raises(AssertionError):
        assert_same({"a": 1, "b": 2}, {"b": 2, "a": 1}, as_stored=True)
    matrix = torch.ones(2, 3)
    assert_same(matrix.t().contiguous().t(), matrix)
    with pytest.raises(AssertionError, match=r"/0/a: .*[Ss]tride"):
        assert_same([{"a": matrix.t().contiguous().t()}], [{"a": matrix}], as_stored=True)
