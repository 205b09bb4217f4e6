"""Compiled code reads parameters below ``__torch_function__``, so the read guard does not notice it.

So nothing is in flight while a compiler reads code. Before a compiled part of the module is called, all its parameters
are waited for. A compiled function that reads parameters may not be a part of the module. The class of a parameter in
flight differs. If such a function finds one, torch compiles it again, and that is noticed. After the third time,
parameters arrive within their steps. Code that compares no classes (``guard_filter_fn``) is not noticed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer, wait_for_parameters_in
from lightning_parstrat.distributed.torch_compat import (
    call_before_compiling,
    compiled_call,
    ignore_warnings_of_global_hooks,
    looks_at_code,
    set_compiled_call,
)

_MOST_IN_FLIGHT = 3
"""So many compilations with parameters in flight are no accident. After eight, torch compiles a function no more."""


class CompiledCode:
    """Waits for parameters before compiled code of ``module`` runs, or a compiler reads code. Not collective.

    Args:
        module: The module. Its parts may be compiled at any time.
        gatherer: Gathers parameters.
    """

    def __init__(self, module: nn.Module, gatherer: ParameterGatherer) -> None:
        self._module = module
        self._gatherer = gatherer
        self._calls: dict[nn.Module, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._found_in_flight = 0
        self._wait_before_calls()
        self._stop = call_before_compiling(self._before_compiling)

    def close(self) -> None:
        """Restores the calls of compiled parts."""
        self._stop()
        for part, (call, waiting) in self._calls.items():
            # The part may have been compiled once more since.
            if compiled_call(part) is waiting:
                set_compiled_call(part, call)
        self._calls.clear()

    def _before_compiling(self, occasion: object) -> None:
        gatherer = self._gatherer
        if gatherer.is_busy and looks_at_code(occasion):
            self._found_in_flight += 1
            gatherer.overlaps = gatherer.overlaps and self._found_in_flight < _MOST_IN_FLIGHT
        gatherer.finish()
        self._wait_before_calls()

    def _wait_before_calls(self) -> None:
        """Looks for parts that are compiled in place: those have no hook that runs before their compiled code."""
        ignore_warnings_of_global_hooks(self._module)
        for part in self._module.modules():
            call = compiled_call(part)
            if call is not None and (part not in self._calls or self._calls[part][1] is not call):
                waiting = partial(_wait_and_call, part, call)
                self._calls[part] = call, waiting
                set_compiled_call(part, waiting)


def _wait_and_call(part: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    wait_for_parameters_in(part)
    return call(*args, **kwargs)
