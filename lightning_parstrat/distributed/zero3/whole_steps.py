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
from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, note_step_called, without_step_hooks
from lightning_parstrat.distributed.zero3.state import fits_parameter, shard_like

STEPPED_WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""torch's optimizers whose update of an element looks at others. Exact classes: a subclass may differ."""

_MAY_STEP = "_may_step_shards"


def step_whole(optimizer: Optimizer) -> None:
    """Has an optimizer step whole parameters from now on, though its groups hold shards. Not collective.

    Its ``step`` becomes collective: parameters, gradients and what the state has of their shape are gathered, and all
    ranks step alike. At most one parameter is whole at a time.

    Args:
        optimizer: Of a class in :data:`STEPPED_WHOLE`.
    """
    own = vars(optimizer)
    if _MAY_STEP not in own:
        optimizer.register_step_pre_hook(_refuse_step_of_class)
    own[_MAY_STEP] = False
    own["step"] = types.MethodType(_step, optimizer)


def _refuse_step_of_class(optimizer: Optimizer, *_: Any) -> None:
    if not vars(optimizer)[_MAY_STEP]:
        name = type(optimizer).__name__
        raise RuntimeError(
            f"`{name}.step` was called, not `step` of the object, which alone knows that its parameters are sharded."
            f" Call `optimizer.step()`, not `{name}.step(optimizer)`, nor an `optimizer.step` kept from before the"
            " training."
        )


def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    # For schedulers, whose wrapper of `step` this may stand in for.
    note_step_called(self)
    own = vars(self)
    own[_MAY_STEP] = True
    try:
        return _step_between_hooks(self, *args, **kwargs)
    finally:
        own[_MAY_STEP] = False


mark_as_wrapped(_step)


@Optimizer.profile_hook_step
def _step_between_hooks(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    step = types.MethodType(type(self).step, self)
    with without_step_hooks(self):
        for group in self.param_groups:
            for parameter in list(group["params"]):
                if parameter.grad is not None:
                    with _shown_whole(self, parameter):
                        step()
    return loss


@contextmanager
def _shown_whole(optimizer: Optimizer, parameter: Tensor) -> Iterator[None]:
    """Within it an optimizer's groups and state hold one parameter, whole, and no other. Collective at its beginning.

    One that is no DTensor is shown as it is.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    whole = _begin_to_show(optimizer, parameter) if isinstance(parameter, DTensor) else parameter
    for group, hidden in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = [whole for one in hidden if one is parameter]
    try:
        yield
    finally:
        for group, hidden in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = hidden
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
