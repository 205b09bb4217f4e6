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


def count_of(number: int) -> str:
    """A number of elements in about three digits, such as ``33.7M``."""
    name, size = next((one for one in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if number >= one[1]), ("", 1))
    return f"{number / size:.3g}{name}"


def amount(nbytes: float) -> str:
    """Bytes with a unit, in about three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
