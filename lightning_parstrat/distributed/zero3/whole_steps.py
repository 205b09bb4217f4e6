"""Optimizers that look at whole parameters: every rank steps them whole, and keeps its shards of what comes of it.

Between steps nothing is whole: the optimizer's groups and its state hold shards, as those of any other do.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, note_step_called, without_step_hooks
from lightning_parstrat.distributed.zero3.state import fits_parameter, shard_like

_ONE_BY_ONE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
_AT_ONCE: frozenset[type[Optimizer]] = frozenset({torch.optim.LBFGS})
STEPPED_WHOLE = _ONE_BY_ONE | _AT_ONCE
"""torch's optimizers whose update of an element looks at others. Exact classes: a subclass may differ."""

_MAY_STEP = "_may_step_shards"


def step_whole(optimizer: Optimizer) -> None:
    """Has an optimizer step whole parameters from now on, though its groups hold shards. Not collective.

    Its ``step`` becomes collective: parameters, gradients and what the state has of their shape are gathered, and all
    ranks step alike. At most one parameter is whole at a time; LBFGS, which needs all of them at once, has all of them.

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
    step = types.MethodType(type(self).step, self)
    with without_step_hooks(self):
        return _step_at_once(self, step, closure) if type(self) in _AT_ONCE else _step_one_by_one(self, step, closure)


def _step_one_by_one(optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for parameter in list(group["params"]):
            if parameter.grad is not None:
                shown = _ShownWhole(optimizer, [parameter])
                try:
                    shown.show()
                    step()
                finally:
                    shown.hide()
    return loss


def _step_at_once(optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    shown = _ShownWhole(optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]])

    def evaluate() -> Any:
        # Forward, backward and clipping are the user's: they see shards, as they are by now.
        shown.hide()
        loss = None if closure is None else closure()
        shown.show()
        return loss

    try:
        shown.show()
        return step(evaluate)
    finally:
        shown.hide()


class _ShownWhole:
    """Has an optimizer's groups and state hold whole tensors of some parameters, and of no others, for a while.

    Args:
        optimizer: The optimizer.
        parameters: Of its groups. Those that are no DTensors are shown as they are.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer = optimizer
        self._whole = {p: _empty_whole(p) for p in parameters}
        self._hidden: list[list[Tensor]] | None = None

    @torch.no_grad()
    def show(self) -> None:
        """Gathers them, with their gradients. Collective."""
        for parameter, whole in self._whole.items():
            if whole is not parameter:
                whole.copy_(_whole(parameter))
                whole.grad = None if parameter.grad is None else _whole(parameter.grad)
                self._move_state(parameter, whole, _whole)
        self._hidden = [list(group["params"]) for group in self._optimizer.param_groups]
        for group, hidden in zip(self._optimizer.param_groups, self._hidden, strict=True):
            # In place: LBFGS keeps the list.
            group["params"][:] = [self._whole[parameter] for parameter in hidden if parameter in self._whole]

    @torch.no_grad()
    def hide(self) -> None:
        """Gives the groups their shards back, as they are by now, if they have not got them. Not collective."""
        if self._hidden is None:
            return
        for group, hidden in zip(self._optimizer.param_groups, self._hidden, strict=True):
            group["params"][:] = hidden
        self._hidden = None
        for parameter, whole in self._whole.items():
            if whole is not parameter:
                local(parameter).copy_(local(shard_like(whole, parameter)))
                whole.grad = None
                self._move_state(whole, parameter, functools.partial(_shard, parameter=parameter))

    def _move_state(self, old: Tensor, new: Tensor, convert: Callable[[Any], Any]) -> None:
        state = self._optimizer.state
        if old in state:
            # In place: LBFGS keeps it while it evaluates its closure.
            state[new] = state.pop(old)
            state[new].update({key: convert(value) for key, value in state[new].items()})


def _empty_whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))


def _shard(value: Any, parameter: Tensor) -> Any:
    return shard_like(value, parameter) if fits_parameter(value, parameter) else value


def _whole(value: Any) -> Any:
    return cast(Any, value.detach()).full_tensor() if isinstance(value, DTensor) else value
