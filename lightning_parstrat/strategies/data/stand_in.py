"""Objects that stand for a loader or a sampler of the user's, and do one thing differently."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import override


class StandIn:
    """Stands for another object: what a subclass has no slot for is read from that object, and set on it.

    Programs that ask what it is an instance of find that object's class; copies and pickles are of that object. So
    nothing of the user's is changed, and nothing has to be given back.

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
        # While it is being made it stands for nothing: asking itself for that would never end.
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
