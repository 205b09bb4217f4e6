"""Wrong names of a strategy's arguments, and the nearest right ones."""

import inspect
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import NoReturn


def arguments_of(classes: Iterable[type]) -> list[str]:
    """Names of the arguments that the first class takes, and passes on to the others.

    Args:
        classes: In the order in which they are created, up to one that refuses what is ``unknown``.
    """
    names: list[str] = []
    for cls in classes:
        parameters = inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}
        names += [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        if "unknown" in parameters:
            break
    return [name for name in dict.fromkeys(names) if name not in ("self", "module")]


def refuse(strategy: type, names: Iterable[str], known: Collection[str]) -> NoReturn:
    """Refuses arguments that a strategy does not have.

    Args:
        strategy: The class.
        names: The names of the arguments.
        known: The arguments that it has.

    Raises:
        TypeError: The message contains the nearest right name of each argument.
    """
    lines = []
    for name in names:
        near = get_close_matches(name, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        lines.append(f"{strategy.__name__}() got an unexpected keyword argument {name!r}.{meant}")
    raise TypeError("\n".join(lines))
