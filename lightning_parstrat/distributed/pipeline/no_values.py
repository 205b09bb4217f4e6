"""Tensors of other stages: they have shapes, and no values. Nothing is computed with them."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.torch_compat import FakeTensor, FakeTensorMode, has_memory, refuse_addresses


class _NoValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Refuses operations that change a tensor with values by one without: torch would change a copy, and drop it.

    Attributes:
        runs_step: Whether a step runs. All ranks run its code around blocks, and only one of them has the values.
        draws: Whether random numbers are drawn for tensors without values.
        kept: The memory that keeps its values after a step.
    """

    runs_step = draws = False
    kept: Callable[[], set[int]] = staticmethod(set[int])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        changes = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
        changed = [one.tensor for one in leaves(args[0]) if has_memory(one.tensor)] if changes else []
        # Those without elements lie nowhere.
        if changed and (not self.runs_step or self.kept().intersection(map(_place, changed)) - {0}):
            raise RuntimeError(
                f"`{name}` would change a tensor by parameters of other stages, which have no values on this rank."
                " Outside of a step, change each parameter by its own values alone. Copies from before the first step"
                " have values: copy parameters after it. Or take a strategy that keeps the module whole."
            )
        if self.draws and torch.Tag.nondeterministic_seeded in func.tags:
            # All ranks draw as many random numbers, so that what they draw afterwards is the same.
            func(*replace_leaves(args, _with_values), **replace_leaves(kwargs, _with_values))
            self.draws = False
            try:
                # torch may make it of other operations that draw.
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.draws = True
        return super().__torch_dispatch__(func, types, args, kwargs)


def _with_values(tensor: Tensor) -> Tensor:
    is_known = has_memory(tensor)
    return tensor.clone() if is_known else torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _place(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


@functools.cache
def _mode() -> _NoValues:
    # There is one, as tensors of two modes do not mix.
    return _NoValues(allow_non_fake_inputs=True)


@contextmanager
def running_step(parameters: Callable[[], Iterable[Tensor]], draws: bool) -> Iterator[None]:
    """Within it, tensors but parameters may be changed by those without values, and kernels are refused.

    Not collective.

    Args:
        parameters: Returns those of the module.
        draws: Whether random numbers are drawn as with values.
    """
    _mode().runs_step, _mode().draws = True, draws
    _mode().kept = lambda: {_place(one) for one in parameters() if has_memory(one)}
    refuse_addresses(_mode(), True)
    try:
        yield
    finally:
        _mode().runs_step, _mode().draws, _mode().kept = False, False, set[int]
        refuse_addresses(_mode(), False)


def without_memory(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape without memory. What is computed with it has a shape and no values, either."""
    with _mode():
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def without_values(tree: Any) -> Any:
    """Tensors of the same shapes without values."""
    return replace_leaves(tree, lambda one: one if isinstance(one, FakeTensor) else _mode().from_tensor(one))
