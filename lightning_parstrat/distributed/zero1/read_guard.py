"""Parameters that are still on the wire look like any other, and are waited for when somebody reads them.

While a bucket is gathered, its parameters are of a subclass of ``nn.Parameter`` whose ``__torch_function__`` waits for
the bucket before it lets the operation go on, and gives the parameters their own class back. Whoever holds a reference
is served: modules, penalties over a list of weights, ``state_dict``, optimizers, callbacks, copies. What asks for
shape, dtype, or gradient alone does not wait. Nothing is paid once a parameter has arrived; to mark and unmark one
takes some tenths of a microsecond.

Only C++ code that takes a parameter without asking torch could read one early, such as an extension called by its
module, or a captured CUDA graph: so modules that are called wait for what they hold, and for what their children hold
where another forward than their class's may not call those.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parstrat.distributed.torch_compat import GRADIENT_HOOKS, own_parameters

_IN_FLIGHT: dict[int, Callable[[], None]] = {}
"""What waits for a marked parameter, by its identity; marked parameters are held by their buckets."""

_WATCH: list[RemovableHandle] = []
"""The hook that has modules wait for what they hold: one for the process, while any parameter is marked."""


def _attributes(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split()]


_KNOWN = "shape dtype device layout ndim grad requires_grad is_leaf grad_fn itemsize nbytes is_cuda is_meta is_sparse"
NEEDS_NO_CONTENT: set[Any] = {
    *(attribute.__get__ for attribute in (*_attributes(_KNOWN), *GRADIENT_HOOKS)),
    *(attribute.__set__ for attribute in (*_attributes("grad requires_grad"), *GRADIENT_HOOKS)),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__hash__,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


class InFlightParameter(nn.Parameter):
    """A parameter whose new values are being gathered. Never instantiated: :func:`mark` swaps classes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in NEEDS_NO_CONTENT:
            found = _marked_in([args, kwargs or {}])
            if found:
                wait_for_parameters(found)
            else:
                # One is hidden in an object of the caller's.
                for arrive in list(_IN_FLIGHT.values()):
                    arrive()
        # A parameter's own calls the function as it is, and leaves the class of what it returns alone.
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy is of the class that this has once it has arrived.
        wait_for_parameters([self])
        return copy.deepcopy(self, memo)


def can_be_marked(*parameters: Tensor) -> bool:
    """Whether their classes can be swapped: a parameter of a subclass may have a ``__torch_function__`` of its own."""
    return {nn.Parameter}.issuperset(map(type, parameters))


def mark(parameters: Iterable[Tensor], arrive: Callable[[], None]) -> None:
    """Has ``arrive`` called before anyone reads one of ``parameters``; it calls :func:`unmark`."""
    if not _WATCH:
        _WATCH.append(register_module_forward_pre_hook(_hook()))
    for parameter in parameters:
        _IN_FLIGHT[id(parameter)] = arrive
        parameter.__class__ = InFlightParameter


def unmark(parameters: Iterable[Tensor]) -> None:
    """Makes of ``parameters`` ordinary ones again."""
    for parameter in parameters:
        _IN_FLIGHT.pop(id(parameter), None)
        parameter.__class__ = nn.Parameter
    # A global hook costs every module call of the process some microseconds: it goes with the last parameter.
    while _WATCH and not _IN_FLIGHT:
        _WATCH.pop().remove()


def wait_for_parameters(parameters: Iterable[Tensor]) -> None:
    """Waits for those of ``parameters`` that are in flight."""
    for parameter in parameters:
        arrive = _IN_FLIGHT.get(id(parameter))
        if arrive is not None:
            arrive()
        elif type(parameter) is InFlightParameter:
            # A copy that something made of the class as it was.
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def wait_for_parameters_in(module: nn.Module) -> None:
    """Waits for those that a module and its children hold."""
    if _IN_FLIGHT:
        wait_for_parameters([parameter for parameter in module.parameters() if type(parameter) is InFlightParameter])


@functools.cache
def _hook() -> Callable[[nn.Module, Any], None]:
    # A module that is compiled in place calls hooks where a compiler looks at all that is called.
    hook: Callable[[nn.Module, Any], None] = torch.compiler.disable(_wait_for_parameters_of)  # type: ignore[no-untyped-call]
    return hook


def _wait_for_parameters_of(module: nn.Module, _: Any) -> None:
    held = module.parameters() if "forward" in vars(module) else own_parameters(module)
    in_flight = [p for p in held if type(p) is InFlightParameter]
    if in_flight:
        wait_for_parameters(in_flight)


def _marked_in(values: Any) -> list[Tensor]:
    """All marked parameters in nested arguments."""
    if isinstance(values, InFlightParameter):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [found for value in values for found in _marked_in(value)]
