"""Numbers and names in messages."""

from collections.abc import Sequence

NAMES_SHOWN = 5


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, such as ``1 rank`` and ``2 ranks``.

    Args:
        number: How many there are.
        noun: The singular.
        plural: By default the singular and an s.
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    further = len(names) - NAMES_SHOWN
    return separator.join(names[:NAMES_SHOWN]) + (f" and {further} more" if further > 0 else "")
