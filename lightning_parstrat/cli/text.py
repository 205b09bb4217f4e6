"""Formatting of output, numbers of arguments, classes by name, and the error of wrong usage."""

import importlib
from argparse import ArgumentTypeError
from collections.abc import Sequence


class UsageError(Exception):
    """Wrong usage: says what was given, what is allowed, and what to do. Ends the command with exit code 2."""


def positive(text: str) -> int:
    """A number of an argument, which must be 1 or more."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in aligned columns. The first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def import_class(path: str) -> type:
    """Imports the class of that name, such as ``my_package.model.MyModule``.

    Raises:
        UsageError: There is no such class.
    """
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except SystemExit as error:
        raise UsageError(
            f"The import of {module} ends the program. Put its LightningCLI under `if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        raise UsageError(
            f"No class {path!r} can be imported from here ({type(error).__name__}: {error}). Give its module and its"
            " name, such as my_package.model.MyModule, and run this in the program's folder."
        ) from error
    if not isinstance(found, type):
        raise UsageError(
            f"No class {path!r} is known. Give its module and its name, such as my_package.model.MyModule."
        )
    return found
