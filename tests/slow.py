"""What of a grid of cases ``make test`` tries, and what it leaves to ``make test-slow``."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_quick: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """Values of a parametrization; those of which ``is_quick`` does not hold are marked slow.

    Args:
        is_quick: Gets the value, or the values of a tuple one by one.
        values: As they would be given to ``pytest.mark.parametrize``.
    """
    found = []
    for value in values:
        arguments = value if type(value) is tuple else (value,)
        found.append(value if is_quick(*arguments) else pytest.param(*arguments, marks=pytest.mark.slow))
    return found
