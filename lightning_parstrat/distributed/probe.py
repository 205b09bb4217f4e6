"""Does an optimizer step each parameter by itself? Asked of the optimizer, not of a list of names.

A deep copy of the optimizer, its parameters replaced by tiny ones, is stepped with all of them, and others as two ranks
would step it that own every other one, under another identity. An optimizer that takes statistics over all parameters
(a global norm, as Prodigy or some LAMBs), that keeps a list of parameters of its own, or that draws random numbers goes
elsewhere there; sharding it would change results without a word.
"""

import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.sharding import ClosureEvaluatedAgainError, OneEvaluation, without_step_hooks

_LARGEST_DIMENSION = 8
_PARAMETERS_PER_GROUP = 16
_GRADIENT_SCALES = ((1.0, 1.0, 1.0), (1e3, 1e-3, 1.0, 1.0, 1.0))
"""So large once that a global clip acts, but not before steps of ordinary length have been compared."""
_SMALLEST_LEARNING_RATE = 1e-3
_HOOKS = tuple(
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_SAME = 1e-3
"""Relative to the largest step of a parameter; rounding stays far below, any dependence seen far above."""


class _Twin(NamedTuple):
    """A copy of an optimizer over probes, of which ``groups`` are the few that are stepped.

    ``gradients`` are theirs, one for each step of each phase: of sizes that differ, in directions that change a little.
    """

    optimizer: Optimizer
    groups: list[list[nn.Parameter]]
    gradients: dict[Tensor, list[list[Tensor]]]


def steps_parameters_alone(optimizer: Optimizer) -> bool | None:
    """Whether a step of ``optimizer`` moves each parameter by its own gradient and state, whoever else is there.

    The optimizer and its parameters are left as they are. Not collective. Milliseconds: at most 16 parameters per
    group, none with a dimension beyond 8, eight steps of each copy.

    Args:
        optimizer: Any optimizer with the class its user gave it.

    Returns:
        None where that cannot be told, because it cannot be copied or does not step (on) such small parameters.

    Raises:
        ClosureEvaluatedAgainError: It evaluates its closure more than once per step.
    """
    return _goes_alike(optimizer, partial(_every_other_one, 0)) and _goes_alike(optimizer, partial(_every_other_one, 1))


def steps_elements_alone(optimizer: Optimizer) -> bool | None:
    """Whether a step moves each element by itself, as far as tiny parameters can tell; else as above."""
    return _goes_alike(optimizer, _first_halves)


def _goes_alike(optimizer: Optimizer, part_of: Callable[[_Twin, _Twin], list[tuple[Tensor, Tensor]]]) -> bool | None:
    with warnings.catch_warnings(), _random_numbers_kept(optimizer):
        warnings.simplefilter("ignore")
        try:
            whole, part = _copy(optimizer), _copy(optimizer)
            watched = [pair for pair in part_of(whole, part) if pair[0].numel()]
            starts = [view.clone() for view, _ in watched]
            _step(whole, 0)
            _step(part, 0)
            alike = _moved_alike(watched, starts)
            if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
                # What a class of its own makes of loaded state must not depend on who else is there, either.
                part.optimizer.load_state_dict(part.optimizer.state_dict())
            _step(whole, 1)
            _step(part, 1)
        except ClosureEvaluatedAgainError:
            raise
        except Exception:
            # Whatever an optimizer may raise that does not expect such parameters, or cannot be copied.
            return None
    if watched and all(torch.equal(view, start) for (view, _), start in zip(watched, starts, strict=True)):
        return None
    return alike and _moved_alike(watched, starts)


def _moved_alike(watched: list[tuple[Tensor, Tensor]], starts: list[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= _SAME * (one - start).abs().max())
        for (one, other), start in zip(watched, starts, strict=True)
    )


def _copy(optimizer: Optimizer) -> _Twin:
    """A deep copy in which every parameter has become a probe, wherever the optimizer refers to it."""
    # Not `copy.deepcopy(optimizer)`: torch's own copying leaves out whatever a subclass has added.
    twin = object.__new__(type(optimizer))
    # A scheduler's wrapper of `step` is bound to the optimizer, whose state may fill the memory.
    memo: dict[int, Any] = {id(optimizer): twin}
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = _probe(parameter, generator)
    # Users' hooks are not meant for a copy, and may hold on to anything.
    kept = {name: OrderedDict() if name in _HOOKS else value for name, value in vars(optimizer).items()}
    twin.__dict__ = copy.deepcopy({**kept, "state": defaultdict(dict)}, memo)
    for group in twin.param_groups:
        if "lr" in group:
            group["lr"] = _noticeable(group["lr"])
        # Of every shape some, and the last as well as the first.
        stride = max(1, len(group["params"]) // _PARAMETERS_PER_GROUP)
        group["params"] = group["params"][::-1][::stride][:_PARAMETERS_PER_GROUP]
    groups = [list(group["params"]) for group in twin.param_groups]
    gradients = {
        probe: _gradients(probe, number) for number, probe in enumerate(probe for group in groups for probe in group)
    }
    return _Twin(twin, groups, gradients)


def _noticeable(learning_rate: Any) -> Any:
    """At the start of a warm-up it is often zero, and what does not move looks as if it moved alone."""
    if isinstance(learning_rate, Tensor):
        return learning_rate.clamp(min=_SMALLEST_LEARNING_RATE)
    return max(learning_rate, _SMALLEST_LEARNING_RATE)


def _gradients(probe: nn.Parameter, number: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(number)
    values = probe.detach().cpu()
    size = 4.0 ** (number % 3)
    return [
        [(scale * size * (values + 0.5 + torch.randn(values.shape, generator=generator))).to(probe) for scale in scales]
        for scales in _GRADIENT_SCALES
    ]


def _probe(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(size, _LARGEST_DIMENSION) for size in parameter.shape]
    values = torch.randn(*shape, 2, generator=generator)
    # In 16 bits small steps would vanish, and large ones overflow; what depends on others does so in 32, too.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    data = torch.view_as_complex(values) if parameter.is_complex() else values[..., 0]
    return nn.Parameter(data.to(dtype=dtype, device=parameter.device, copy=True).contiguous())


def _every_other_one(remainder: int, whole: _Twin, part: _Twin) -> list[tuple[Tensor, Tensor]]:
    """Lets ``part`` step only every other parameter, each replaced by a shard that is all of it."""
    watched = []
    number = 0
    for group, ours, theirs in zip(part.optimizer.param_groups, whole.groups, part.groups, strict=True):
        group["params"] = []
        for one, other in zip(ours, theirs, strict=True):
            number += 1
            if number % 2 == remainder:
                shard = nn.Parameter(other.detach().clone())
                part.gradients[shard] = part.gradients[other]
                group["params"].append(shard)
                watched.append((one.detach(), shard.detach()))
    return watched


def _first_halves(whole: _Twin, part: _Twin) -> list[tuple[Tensor, Tensor]]:
    """Lets ``part`` step only the first half of every parameter, as one row of elements."""
    watched = []
    for group, ours, theirs in zip(part.optimizer.param_groups, whole.groups, part.groups, strict=True):
        group["params"] = []
        for one, other in zip(ours, theirs, strict=True):
            if one.numel():
                half = (one.numel() + 1) // 2
                shard = nn.Parameter(other.detach().flatten()[:half].clone())
                part.gradients[shard] = [
                    [gradient.flatten()[:half] for gradient in phase] for phase in part.gradients[other]
                ]
                group["params"].append(shard)
                watched.append((one.detach().view(-1)[:half], shard.detach()))
    return watched


@contextmanager
def _random_numbers_kept(optimizer: Optimizer) -> Iterator[None]:
    """What a step may draw within it is not missing from the training's."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    devices = {parameter.device.index for parameter in parameters if parameter.device.type == "cuda"}
    python = random.getstate()
    # torch works without numpy.
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _step(twin: _Twin, phase: int) -> None:
    optimizer = twin.optimizer
    for number in range(len(_GRADIENT_SCALES[phase])):
        for probe, gradients in twin.gradients.items():
            probe.grad = gradients[phase][number].clone()
        # Not `optimizer.step`, which a scheduler may have wrapped.
        with without_step_hooks(optimizer):
            type(optimizer).step(optimizer, closure=OneEvaluation(lambda: torch.zeros(()), type(optimizer).__name__))
