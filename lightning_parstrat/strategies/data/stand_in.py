"""Objects that stand for a user's loader or sampler, and do one thing differently."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import override


class StandIn:
    """Stands for another object: attributes without a slot in a subclass are read from that object, and set on it.

    ``isinstance`` finds that object's class. Copies and pickles are copies of that object. So the user's objects are
    not changed, and need not be restored.

    Attributes:
        stands_for: The object.
    """

    __slots__ = ("stands_for",)

    def __init__(self, stands_for: Any) -> None:
        self.stands_for = stands_for

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stands_for)

    def __len__(self) -> int:
        return len(self.stands_for)

    def __getattr__(self, name: str) -> Any:
        # Before `__init__` has set it, a lookup would recurse forever.
        if name == "stands_for":
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if any(name in getattr(cls, "__slots__", ()) for cls in type(self).__mro__):
            object.__setattr__(self, name, value)
        else:
            setattr(self.stands_for, name, value)

    @override
    def __reduce__(self) -> Any:
        return _itself, (self.stands_for,)

    @property
    def __class__(self) -> Any:
        return self.stands_for.__class__


def _itself(stands_for: Any) -> Any:
    return stands_for
