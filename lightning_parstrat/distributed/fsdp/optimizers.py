"""Optimizers of sharded modules: those that step shards as they step whole parameters, and those that step whole ones.

torch's element-wise optimizers step each rank's part as a plain tensor. Kernels for many tensors take no mixture of
DTensors and others, nor of DTensors of several meshes, and each operation on a DTensor takes longer.

Muon and Adafactor need whole parameters. Every rank then steps them whole, one at a time, and keeps its shards of the
result. Between steps nothing is whole: the groups and the state hold shards, as those of any other optimizer do.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.cuts import local, whole
from lightning_parstrat.distributed.engine.shardability import reason_against_rows
from lightning_parstrat.distributed.engine.state import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.engine.stepping import (
    needs_closure,
    refuse_step_of_class,
    showing,
    stepping_by,
)
from lightning_parstrat.distributed.fsdp.state import fits_parameter, shard_like, with_own_part
from lightning_parstrat.distributed.torch_compat import is_wrapped_by_scheduler, mark_as_wrapped, without_step_hooks

STEPPED_WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""torch's optimizers whose update of an element depends on others. Exact classes: a subclass may differ."""


def prepare_optimizers(optimizers: Iterable[Optimizer], control: Collectives) -> None:
    """Makes each optimizer step shards, or whole parameters (:data:`STEPPED_WHOLE`), or refuses it. Collective.

    It takes milliseconds for each optimizer that is not one of torch's element-wise ones. A copy steps a few small
    parameters, whole and sharded, and both must have the same result.

    Args:
        optimizers: Optimizers of a sharded module.
        control: Compares the ranks' results.

    Raises:
        ValueError: One of them cannot be used. The message contains its name, the reason, and alternatives.
    """
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mesh = next((parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)), None)
        if mesh is None:
            continue
        meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in parameters}
        is_replaced = "step" in vars(optimizer) and not is_wrapped_by_scheduler(optimizer.step)
        reason = "its `step` was replaced on the object" if is_replaced and len(meshes) > 1 else ""
        if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
            if not is_replaced:
                vars(optimizer)["step"] = types.MethodType(_step_local, optimizer)
        elif type(optimizer) in STEPPED_WHOLE and not is_replaced:
            vars(optimizer)["step"] = types.MethodType(_step, optimizer)
            optimizer.register_step_pre_hook(refuse_step_of_class)
        elif needs_closure(optimizer):
            reason = "its `step` needs a closure, and looks at all parameters as one vector"
        else:
            reason = reason or reason_against_rows(optimizer, mesh)
        if any_rank(bool(reason), control):
            raise ValueError(
                f"{type(optimizer).__name__} cannot step sharded parameters: {reason or 'it failed on another rank'}."
                " Use one that moves each element by itself, such as torch.optim.AdamW, or strategy='zero1_custom',"
                " which leaves each matrix whole on one rank."
            )


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _steps_local(optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
    """Steps this rank's parts of parameters. Not collective."""
    loss = _evaluate(closure)
    step = types.MethodType(type(optimizer).step, optimizer)
    with torch.no_grad(), without_step_hooks(optimizer), _shown_local(optimizer):
        step(**arguments)
    return loss


_step_local = stepping_by(_steps_local)
mark_as_wrapped(_step_local)


@contextmanager
def _shown_local(optimizer: Optimizer) -> Iterator[None]:
    """Within it, an optimizer's groups and state hold this rank's parts as plain tensors. Not collective."""
    parts: dict[DTensor, Tensor] = {}
    states: dict[Tensor, Any] = {}
    for parameter in (one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor)):
        parts[parameter] = part = local(parameter).detach()
        part.grad = None if parameter.grad is None else local(parameter.grad)
        if parameter in optimizer.state:
            states[parameter] = optimizer.state.pop(parameter)
            optimizer.state[part] = {key: _own(value, parameter) for key, value in states[parameter].items()}
    stand_ins = [[parts.get(one, one) for one in group["params"]] for group in optimizer.param_groups]
    try:
        with showing(optimizer, stand_ins):
            yield
    finally:
        for parameter, part in parts.items():
            if part in optimizer.state:
                old = states.get(parameter, {})
                new = optimizer.state.pop(part).items()
                optimizer.state[parameter] = {key: _like_before(value, old.get(key), parameter) for key, value in new}


def _own(value: Any, parameter: DTensor) -> Any:
    # A program may have set whole tensors.
    is_whole = not isinstance(value, DTensor) and fits_parameter(value, parameter)
    return local(shard_like(value, parameter) if is_whole else value)


def _like_before(value: Any, before: Any, parameter: DTensor) -> Any:
    """The DTensor of which a step has changed this rank's part, or a new one if the part is new."""
    if before is not None and local(before) is value:
        return before
    is_part = isinstance(value, Tensor) and value.dim() > 0 and value.shape == local(parameter).shape
    return with_own_part(value, parameter) if is_part else value


def _steps_whole(optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
    """Gathers parameters, gradients and state of their shape, and steps. Collective."""
    loss = _evaluate(closure)
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
    """Within it, an optimizer's groups and state hold one parameter, whole, and no other. Collective at its beginning.

    A parameter that is no DTensor is shown unchanged.
    """
    shown = parameter
    if isinstance(parameter, DTensor):
        shown = nn.Parameter(whole(parameter.detach()))
        shown.grad = whole(cast(Tensor, parameter.grad))
        _move_state(optimizer, parameter, shown, whole)
    stand_ins = [[shown for one in group["params"] if one is parameter] for group in optimizer.param_groups]
    try:
        with showing(optimizer, stand_ins):
            yield
    finally:
        if shown is not parameter:
            with torch.no_grad():
                local(parameter).copy_(local(shard_like(shown, parameter)))

            def cut(value: Any) -> Any:
                return shard_like(value, parameter) if fits_parameter(value, parameter) else value

            _move_state(optimizer, shown, parameter, cut)


@torch.no_grad()
def _move_state(optimizer: Optimizer, old: Tensor, new: Tensor, convert: Callable[[Any], Any]) -> None:
    if old in optimizer.state:
        optimizer.state[new] = {key: convert(value) for key, value in optimizer.state.pop(old).items()}
