"""Checks of what users choose. An error names the argument, its value, and what is allowed."""

import math
from typing import Any, get_args


def check(policy: object, name: str, is_allowed: bool, must_be: str) -> None:
    """Raises if a policy's argument is not allowed.

    Raises:
        ValueError: The message says what it must be.
    """
    if not is_allowed:
        raise ValueError(f"Invalid {name}: {getattr(policy, name)!r}. Must be {must_be}.")


def check_choices(policy: object, **choices: object) -> None:
    """Raises if an argument is not one of a ``Literal``'s values."""
    for name, literal in choices.items():
        allowed = get_args(literal)
        check(policy, name, getattr(policy, name) in allowed, f"one of {allowed}")


def check_flags(policy: object, *names: str) -> None:
    """Raises if an argument is neither True nor False."""
    for name in names:
        check(policy, name, isinstance(getattr(policy, name), bool), "True or False")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number. bool is a subclass of int, so True would pass as 1 without a check."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
