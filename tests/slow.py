"""What of a grid of cases ``make test`` tries, and what it leaves to ``make test-slow``; what is left out elsewhere."""

import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

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


def lack(reason: str) -> NoReturn:
    """Skips a test whose machine lacks something; fails where ``PARSTRAT_REQUIRE_CLUSTER`` says that it is there."""
    if os.environ.get("PARSTRAT_REQUIRE_CLUSTER"):
        pytest.fail(reason)
    pytest.skip(reason)
