"""Data loaders whose class is swapped for one that iterates differently: the loader itself stays what its user has."""

from collections.abc import Mapping
from functools import partial
from typing import Any


class SwappedLoader:
    """Base of the classes that loaders get, whose own class comes first among the bases.

    An object's class can only be swapped for one of the same memory layout. So this class and its kinds have empty
    ``__slots__``, and methods are given to :func:`swap_class`.
    """

    __slots__ = ()
    class_before: type
    """The loader's own class, or one that it was swapped for before."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies, such as are sent to worker processes, have the loader's own class."""
        swapped = own = type(self)
        while issubclass(own, SwappedLoader):
            own = own.class_before
        set_class(self, own)
        try:
            make, *rest = self.__reduce_ex__(protocol)
            # Of `copyreg.__newobj__`, pickle checks that the class is the object's, which it is not here; a partial is
            # not checked.
            return partial(make), *rest
        finally:
            set_class(self, swapped)


def swap_class(dataloader: Any, kind: type[SwappedLoader], namespace: Mapping[str, Any]) -> None:
    """Gives a loader a class of its own.

    Args:
        dataloader: The loader.
        kind: What it is an instance of from now on.
        namespace: Methods that take the place of the loader's own, and what they need.

    Raises:
        TypeError: Its class cannot be swapped.
    """
    cls = type(dataloader)
    own_names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "class_before": cls}
    methods = {"__reduce_ex__": SwappedLoader.__reduce_ex__, **namespace}
    set_class(dataloader, type(cls.__name__, (cls, kind), {**own_names, **methods}))


def set_class(instance: object, cls: type) -> None:
    """Bypasses the instance's own ``__setattr__``, with which a frozen dataclass would refuse."""
    object.__setattr__(instance, "__class__", cls)
