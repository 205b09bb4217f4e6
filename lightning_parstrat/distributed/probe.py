"""Does an optimizer step each parameter by itself? Asked of the optimizer, not of a list of names.

A deep copy of the optimizer, its parameters replaced by tiny ones, is stepped twice: once with all of them, once as a
rank would step it that owns every other one, under another identity. An optimizer that takes statistics over all
parameters (a global norm, as Prodigy or some LAMBs), that keeps a list of parameters of its own, or that draws random
numbers ends elsewhere the second time; sharding it would change results without a word.
"""

import copy
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.sharding import undecorated_step

_LARGEST_DIMENSION = 8
_PARAMETERS_PER_GROUP = 16
_GRADIENT_SCALES = (1.0, 1.0, 1.0, 1e3, 1e-3, 1.0, 1.0, 1.0)
"""So large once that a global clip acts."""
_SAME = 1e-3
"""Relative to the largest step of a parameter; rounding stays far below, any dependence seen far above."""


class ClosureEvaluatedAgainError(RuntimeError):
    """An optimizer called its closure a second time within one step."""


class OneEvaluation:
    """Stands for a closure that has been evaluated already: gives its loss, once.

    Args:
        loss: What the closure returned.
        optimizer: The optimizer's name, for the message.
    """

    def __init__(self, loss: Any, optimizer: str) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._given = False

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Returns the loss.

        Raises:
            ClosureEvaluatedAgainError: It was called before.
        """
        if self._given:
            raise ClosureEvaluatedAgainError(
                f"{self._optimizer} evaluates its closure more than once per step, which sharded optimizer state does"
                " not allow. Choose an optimizer that needs one evaluation, or `strategy='ddp'`."
            )
        self._given = True
        return self._loss


class _Twin(NamedTuple):
    """A copy of an optimizer over probes, of which ``groups`` are the few that are stepped.

    ``gradients`` are theirs, one for each step: of sizes that differ, in directions that change a little.
    """

    optimizer: Optimizer
    groups: list[list[nn.Parameter]]
    gradients: dict[Tensor, list[Tensor]]


def steps_parameters_alone(optimizer: Optimizer) -> bool | None:
    """Whether a step of ``optimizer`` moves each parameter by its own gradient and state, whoever else is there.

    The optimizer and its parameters are left as they are. Not collective. Milliseconds: at most 16 parameters per
    group, none with a dimension beyond 8, eight steps twice.

    Args:
        optimizer: Any optimizer with the class its user gave it.

    Returns:
        None where that cannot be told, because it cannot be copied or does not step on such small parameters.

    Raises:
        ClosureEvaluatedAgainError: It evaluates its closure more than once per step.
    """
    return _ends_alike(optimizer, _every_other_one)


def steps_elements_alone(optimizer: Optimizer) -> bool | None:
    """Whether a step moves each element by itself, as far as tiny parameters can tell; else as above."""
    return _ends_alike(optimizer, _first_halves)


def _ends_alike(optimizer: Optimizer, part_of: Any) -> bool | None:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            whole, part = _copy(optimizer), _copy(optimizer)
            watched = part_of(whole, part)
            starts = [whole_view.clone() for whole_view, _ in watched]
            _step(whole)
            _step(part)
        except ClosureEvaluatedAgainError:
            raise
        except Exception:
            # Whatever an optimizer may raise that does not expect such parameters, or cannot be copied.
            return None
    return all(
        bool((one - other).abs().max() <= _SAME * (one - start).abs().max())
        for (one, other), start in zip(watched, starts, strict=True)
    )


def _copy(optimizer: Optimizer) -> _Twin:
    """A deep copy in which every parameter has become a probe, wherever the optimizer refers to it."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = _probe(parameter, generator)
    # Not `copy.deepcopy(optimizer)`: torch's own copying leaves out whatever a subclass has added.
    twin = object.__new__(type(optimizer))
    twin.__dict__ = copy.deepcopy({**vars(optimizer), "state": defaultdict(dict)}, memo)
    for group in twin.param_groups:
        # Of every shape some, and the last as well as the first.
        stride = max(1, len(group["params"]) // _PARAMETERS_PER_GROUP)
        group["params"] = group["params"][::-1][::stride][:_PARAMETERS_PER_GROUP]
    groups = [list(group["params"]) for group in twin.param_groups]
    gradients = {
        probe: _gradients(probe, number) for number, probe in enumerate(probe for group in groups for probe in group)
    }
    return _Twin(twin, groups, gradients)


def _gradients(probe: nn.Parameter, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    values = probe.detach().cpu()
    size = 4.0 ** (number % 3)
    noises = [torch.randn(values.shape, generator=generator) for _ in _GRADIENT_SCALES]
    return [
        (scale * size * (values + 0.5 + noise)).to(probe.dtype).to(probe.device)
        for scale, noise in zip(_GRADIENT_SCALES, noises, strict=True)
    ]


def _probe(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(size, _LARGEST_DIMENSION) for size in parameter.shape]
    values = torch.randn(*shape, 2, generator=generator)
    dtype = parameter.dtype if parameter.is_floating_point() or parameter.is_complex() else torch.float32
    data = torch.view_as_complex(values) if parameter.is_complex() else values[..., 0]
    probe = nn.Parameter(data.to(dtype=dtype, device=parameter.device, copy=True).contiguous())
    return probe


def _every_other_one(whole: _Twin, part: _Twin) -> list[tuple[Tensor, Tensor]]:
    """Lets ``part`` step only every other parameter, each replaced by a shard that is all of it."""
    watched = []
    number = 0
    for group, ours, theirs in zip(part.optimizer.param_groups, whole.groups, part.groups, strict=True):
        group["params"] = []
        for one, other in zip(ours, theirs, strict=True):
            number += 1
            if number % 2:
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
                part.gradients[shard] = [gradient.flatten()[:half] for gradient in part.gradients[other]]
                group["params"].append(shard)
                watched.append((one.detach().view(-1)[:half], shard.detach()))
    return watched


def _step(twin: _Twin) -> None:
    optimizer = twin.optimizer
    # Not `optimizer.step`: hooks that users registered, and schedulers' wrappers, are not meant for this one.
    step = undecorated_step(type(optimizer))
    for number in range(len(_GRADIENT_SCALES)):
        for probe, gradients in twin.gradients.items():
            probe.grad = gradients[number].clone()
        step(optimizer, closure=OneEvaluation(torch.zeros(()), type(optimizer).__name__))
