"""Optimizers that look at whole parameters: every rank steps them whole, and keeps its shards of what comes of it.

Between steps nothing is whole: the optimizer's groups and its state hold shards, as those of any other do.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, without_step_hooks
from lightning_parstrat.distributed.zero1.stepping import ShownGroups, refuse_step_of_class, stepping_by
from lightning_parstrat.distributed.zero3.state import fits_parameter, shard_like

STEPPED_WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""torch's optimizers whose update of an element looks at others. Exact classes: a subclass may differ."""


def step_whole(optimizer: Optimizer) -> None:
    """Has an optimizer step whole parameters from now on, though its groups hold shards. Not collective.

    Its ``step`` becomes collective: parameters, gradients and what the state has of their shape are gathered, and all
    ranks step alike. At most one parameter is whole at a time.

    Args:
        optimizer: Of a class in :data:`STEPPED_WHOLE`.
    """
    own = vars(optimizer)
    if getattr(own.get("step"), "__func__", None) is not _step:
        optimizer.register_step_pre_hook(refuse_step_of_class)
        own["step"] = types.MethodType(_step, optimizer)


def _steps_whole(optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    step = types.MethodType(type(optimizer).step, optimizer)
    with without_step_hooks(optimizer):
        for group in optimizer.param_groups:
            for parameter in list(group["params"]):
                if parameter.grad is not None:
                    with _shown_whole(optimizer, parameter):
                        step(**arguments)
    return loss


_step = stepping_by(_steps_whole)
mark_as_wrapped(_step)


@contextmanager
def _shown_whole(optimizer: Optimizer, parameter: Tensor) -> Iterator[None]:
    """Within it an optimizer's groups and state hold one parameter, whole, and no other. Collective at its beginning.

    One that is no DTensor is shown as it is.
    """
    whole = _begin_to_show(optimizer, parameter) if isinstance(parameter, DTensor) else parameter
    groups = ShownGroups(optimizer)
    groups.show([[whole for one in group["params"] if one is parameter] for group in optimizer.param_groups])
    try:
        yield
    finally:
        groups.restore()
        if whole is not parameter:
            with torch.no_grad():
                local(parameter).copy_(local(shard_like(whole, parameter)))
                _move_state(optimizer, whole, parameter, functools.partial(_shard, parameter=parameter))


@torch.no_grad()
def _begin_to_show(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    whole = nn.Parameter(_whole(parameter))
    whole.grad = _whole(parameter.grad)
    _move_state(optimizer, parameter, whole, _whole)
    return whole


def _move_state(optimizer: Optimizer, old: Tensor, new: Tensor, convert: Callable[[Any], Any]) -> None:
    state = optimizer.state
    if old in state:
        state[new] = {key: convert(value) for key, value in state.pop(old).items()}


def _shard(value: Any, parameter: Tensor) -> Any:
    return shard_like(value, parameter) if fits_parameter(value, parameter) else value


def _whole(value: Any) -> Any:
    return cast(Any, value.detach()).full_tensor() if isinstance(value, DTensor) else value
