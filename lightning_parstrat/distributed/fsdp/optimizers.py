"""Optimizers of sharded modules: those that step shards as they step whole parameters, and those that step whole ones.

torch's element-wise optimizers step each rank's part as a plain tensor. Kernels for many tensors take no mixture of
DTensors and others, nor of DTensors of several meshes, and each operation on a DTensor takes longer.

Muon and Adafactor need whole parameters. Every rank then steps them whole, one at a time, and keeps its shards of the
result. Between steps nothing is whole: the groups and the state hold shards, as those of any other optimizer do.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
from lightning_parstrat.distributed.torch_compat import is_step_replaced, mark_as_wrapped, without_step_hooks

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
        is_replaced = is_step_replaced(optimizer)
        reason = "its `step` was replaced on the object" if is_replaced and len(meshes) > 1 else ""
        if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
            if not is_replaced:
                vars(optimizer)["step"] = types.MethodType(_step_local, optimizer)
        elif type(optimizer) in STEPPED_WHOLE and not is_replaced:
            vars(optimizer)["step"] = types.MethodType(_step_whole, optimizer)
            optimizer.register_step_pre_hook(refuse_step_of_class)
        elif needs_closure(type(optimizer)):
            reason = "its `step` needs a closure, and looks at all parameters as one vector"
        else:
            reason = reason or reason_against_rows(optimizer, mesh)
        if any_rank(bool(reason), control):
            raise ValueError(
                f"{type(optimizer).__name__} cannot step sharded parameters: {reason or 'it failed on another rank'}."
                " Use one that moves each element by itself, such as torch.optim.AdamW, or strategy='zero1_custom',"
                " whose optimizers step whole parameters."
            )


def _stepping(shown_in_turn: Callable[[Optimizer], Iterator[AbstractContextManager[None]]]) -> Callable[..., Any]:
    """A ``step`` for an optimizer's instance, which calls the class's once within each of some contexts."""

    def steps(optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = types.MethodType(type(optimizer).step, optimizer)
        with torch.no_grad(), without_step_hooks(optimizer):
            for shown in shown_in_turn(optimizer):
                with shown:
                    step(**arguments)
        return loss

    stepping = stepping_by(steps)
    mark_as_wrapped(stepping)
    return stepping


def _local_parts(optimizer: Optimizer) -> Iterator[AbstractContextManager[None]]:
    """Shows this rank's parts of all parameters at once, as plain tensors. Not collective."""
    shown: dict[Tensor, Tensor] = {}
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        shown[parameter] = parameter
        if isinstance(parameter, DTensor):
            shown[parameter] = part = local(parameter).detach()
            part.grad = None if parameter.grad is None else local(parameter.grad)
    yield _shown(optimizer, shown, _own, _like_before)


def _own(value: Any, parameter: Tensor) -> Any:
    # A program may have set whole tensors.
    is_whole = not isinstance(value, DTensor) and fits_parameter(value, parameter)
    return local(shard_like(value, parameter) if is_whole else value)


def _like_before(value: Any, before: Any, parameter: Any) -> Any:
    """The DTensor of which a step has changed this rank's part, or a new one if the part is new."""
    if before is not None and local(before) is value:
        return before
    is_part = isinstance(value, Tensor) and value.dim() > 0 and value.shape == local(parameter).shape
    return with_own_part(value, parameter) if is_part else value


def _whole_in_turn(optimizer: Optimizer) -> Iterator[AbstractContextManager[None]]:
    """Shows one parameter after the other, whole, with its gradient and its state. Collective."""
    for parameter in [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]:
        if not isinstance(parameter, DTensor):
            yield _shown(optimizer, {parameter: parameter}, _gathered, _cut)
            continue
        full = nn.Parameter(whole(parameter.detach()))
        full.grad = whole(cast(Tensor, parameter.grad))
        yield _shown(optimizer, {parameter: full}, _gathered, _cut)
        local(parameter).copy_(local(shard_like(full, parameter)))


def _gathered(value: Any, _: Tensor) -> Any:
    return whole(value)


def _cut(value: Any, _: Any, parameter: Tensor) -> Any:
    return shard_like(value, parameter) if fits_parameter(value, parameter) else value


@contextmanager
def _shown(
    optimizer: Optimizer,
    stand_ins: Mapping[Tensor, Tensor],
    take: Callable[[Any, Tensor], Any],
    give_back: Callable[[Any, Any, Tensor], Any],
) -> Iterator[None]:
    """Within it, an optimizer's groups and state hold stand-ins of parameters, and no other parameters.

    Args:
        optimizer: The optimizer.
        stand_ins: By the parameters that are shown. The state of one that stands for itself does not change.
        take: Makes the value of a state that is shown. It gets the value and its parameter.
        give_back: Makes the value that is kept. It gets the shown one, the one before, and their parameter.
    """
    state = optimizer.state
    moved = {one: shown for one, shown in stand_ins.items() if shown is not one}
    before = {one: state.pop(one) for one in moved if one in state}
    state.update({moved[one]: {key: take(v, one) for key, v in values.items()} for one, values in before.items()})
    groups = [[stand_ins[one] for one in group["params"] if one in stand_ins] for group in optimizer.param_groups]
    try:
        with showing(optimizer, groups):
            yield
    finally:
        for one, shown in moved.items():
            if shown in optimizer.state:
                old, new = before.get(one, {}), optimizer.state.pop(shown)
                optimizer.state[one] = {key: give_back(value, old.get(key), one) for key, value in new.items()}


_step_local = _stepping(_local_parts)
_step_whole = _stepping(_whole_in_turn)
