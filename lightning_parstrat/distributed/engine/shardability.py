"""What can be sharded, and how; what is replicated instead, as under DDP.

Nothing is refused that can be had with DDP's memory: an optimizer that looks at all parameters together is left as it
is, on every rank, with averaged gradients in ``param.grad``.
"""

import copy
import inspect
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_parstrat.core.layout import Partition
from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.core.update_cost import elementwise, newton_schulz
from lightning_parstrat.distributed.engine.state import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.engine.stepping import (
    METHODS,
    ClosureEvaluatedAgainError,
    OneEvaluation,
    needs_closure,
)
from lightning_parstrat.distributed.torch_compat import (
    attributes_without_hooks,
    is_wrapped_by_scheduler,
    names_ignored_by_ddp,
    takes_hooks,
    without_step_hooks,
)

_AGAIN = "between two evaluations every rank needs all parameters as they are by then"
_LARGEST_DIMENSION = 8
_PARAMETERS_PER_GROUP = 16
_GRADIENT_SCALES = ((1.0, 1.0, 1.0), (1e3, 1e-3, 1.0, 1.0, 1.0))
"""So large once that a global clip acts, but not before steps of ordinary length have been compared."""
_SMALLEST_LEARNING_RATE = 1e-3
_LONGEST_ERROR = 100
"""Of an error's text, in a message of one line."""
_SAME = 1e-3
"""Relative to the largest step of a parameter; rounding stays far below, any dependence seen far above."""


_ANOTHER_OPTIMIZER = "What moves each parameter by its own gradient alone is sharded, such as torch.optim.AdamW."


class ShardingDecision(NamedTuple):
    """How an optimizer's parameters are partitioned; None where they are replicated, for ``reason``.

    ``remedy`` is a sentence for the user: what would be sharded instead.
    """

    partition: Partition | None
    reason: str = ""
    remedy: str = ""


def decide_sharding(optimizer: Optimizer, choice: PartitionChoice) -> ShardingDecision:
    """How to shard ``optimizer``, if it can be.

    ``"auto"`` cuts parameters only for torch's element-wise optimizers; any other leaves them uncut on one rank, and is
    tried out first (see :func:`steps_parameters_alone`). Not collective.

    Args:
        optimizer: Not sharded yet.
        choice: The user's; ``"parameter"`` is a promise that the optimizer steps each alone.

    Raises:
        ValueError: The optimizer wants sparse gradients, or ``"element"`` was asked for and it is none of torch's
            element-wise ones.
    """
    if not isinstance(optimizer, Optimizer):
        return ShardingDecision(
            None, "it is no torch.optim.Optimizer", "A subclass of torch.optim.Optimizer can be sharded."
        )
    check_supported(optimizer)
    cls = type(optimizer)
    for reason, remedy in _obstacles(optimizer):
        return ShardingDecision(None, reason, remedy)
    if cls in ELEMENTWISE_OPTIMIZERS:
        return ShardingDecision("element" if choice == "auto" else choice)
    if choice == "element":
        raise ValueError(
            f"partition='element' was asked for, but {cls.__name__} is none of torch's optimizers that step each"
            " element by itself, as AdamW does: cut into shards it might train differently. Use partition='auto' or"
            " 'parameter'."
        )
    try:
        return _try_out(optimizer) if choice == "auto" else ShardingDecision(choice)
    except ClosureEvaluatedAgainError:
        return ShardingDecision(
            None, f"it evaluates its closure more than once per step, and {_AGAIN}", _ANOTHER_OPTIMIZER
        )


def _obstacles(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Why it cannot be sharded whatever it steps, each with what would be."""
    cls = type(optimizer)
    if not takes_hooks(optimizer):
        yield "its class does not call `Optimizer.__init__`", "A class that does can be sharded."
    replaced = _replaced_method(optimizer)
    if replaced is not None:
        yield f"its `{replaced}` was replaced on the object", f"A subclass that overrides `{replaced}` can be sharded."
    if cls.state_dict is not Optimizer.state_dict:
        yield "its class has a `state_dict` of its own", "Optimizers that save their state as torch's do can be."
    if needs_closure(optimizer):
        yield f"its `step` needs a closure, and {_AGAIN}", _ANOTHER_OPTIMIZER
    if hasattr(cls, "train") and hasattr(cls, "eval"):
        yield "its `train` and `eval` change parameters outside of `step`", _ANOTHER_OPTIMIZER


def _replaced_method(optimizer: Optimizer) -> str | None:
    """One of the methods that would get another in its place, where the user's is no ordinary method of the class."""
    own = vars(optimizer)
    for name in sorted(METHODS):
        if name in own and not (name == "step" and is_wrapped_by_scheduler(optimizer.step)):
            return name
        if isinstance(inspect.getattr_static(type(optimizer), name), property):
            return name
    return None


def replicated_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> set[Tensor]:
    """Parameters of ``optimizers`` that cannot move into a bucket, so that every rank steps them.

    Those that share memory with another parameter or buffer without being the same, those that DDP is told to ignore,
    and those of dtypes that have no gradients.
    """
    parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    ignored = names_ignored_by_ddp(module)
    ignored_tensors = {parameter for name, parameter in module.named_parameters() if name in ignored}
    unmovable = {p for p in parameters if not (p.is_floating_point() or p.is_complex())}
    sharing = sharing_memory([*parameters, *module.parameters(), *module.buffers()])
    return parameters & (ignored_tensors | unmovable | sharing)


def update_cost(optimizer: Optimizer, parameter: Tensor) -> float:
    """What stepping ``parameter`` costs, in operations, so that several optimizers' can be weighed together."""
    if isinstance(optimizer, torch.optim.Muon):
        steps = next(
            group["ns_steps"] for group in optimizer.param_groups if any(p is parameter for p in group["params"])
        )
        return newton_schulz(parameter.shape, steps)
    return elementwise(parameter.numel())


def check_supported(optimizer: Optimizer) -> None:
    """Refuses optimizers that want sparse gradients.

    Raises:
        ValueError: It is one.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{type(optimizer).__name__} works on sparse gradients, and only dense ones can be sharded. Use Adam with"
            " `nn.Embedding(..., sparse=False)`, or `strategy='ddp'`."
        )


def _try_out(optimizer: Optimizer) -> ShardingDecision:
    found = steps_parameters_alone(optimizer)
    if found.alike:
        return ShardingDecision("parameter")
    if found.alike is not None:
        return ShardingDecision(None, "how it moves one parameter depends on the others", _ANOTHER_OPTIMIZER)
    if not found.error:
        # As those do that take a gradient in the middle of a step: a promise would train them wrong.
        return ShardingDecision(None, "its `step` moved nothing when it was tried on a copy", _ANOTHER_OPTIMIZER)
    return ShardingDecision(
        None,
        f"trying it on a copy failed ({found.error})",
        "partition='parameter' shards it all the same: right only if no parameter's step looks at others, not even by a"
        " norm over all of them, as SAM's does.",
    )


def sharing_memory(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Those of ``tensors`` whose memory overlaps that of another one among them."""
    distinct = [tensor for tensor in dict.fromkeys(tensors) if _has_memory(tensor)]
    extents = sorted((*_extent(tensor), number) for number, tensor in enumerate(distinct))
    sharing: set[Tensor] = set()
    last_stop, last = -1, -1
    for start, stop, number in extents:
        if start < last_stop:
            sharing |= {distinct[last], distinct[number]}
        if stop > last_stop:
            last_stop, last = stop, number
    return sharing


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, of what a strided tensor may read."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


class _Twin(NamedTuple):
    """A copy of an optimizer over probes, of which ``groups`` are the few that are stepped.

    ``gradients`` are theirs, one for each step of each phase: of sizes that differ, in directions that change a little.
    """

    optimizer: Optimizer
    groups: list[list[nn.Parameter]]
    gradients: dict[Tensor, list[list[Tensor]]]


class Trial(NamedTuple):
    """Whether a part moves as in the whole; None if that is unknown, because of ``error`` or as nothing moved."""

    alike: bool | None
    error: str = ""


def steps_parameters_alone(optimizer: Optimizer) -> Trial:
    """Whether a step of ``optimizer`` moves each parameter by its own gradient and state, whoever else is there.

    The optimizer and its parameters are left as they are. Not collective. Milliseconds: at most 16 parameters per
    group, none with a dimension beyond 8, eight steps of each copy.

    Args:
        optimizer: Any optimizer with the class its user gave it.

    Returns:
        Unknown for what cannot be copied, or does not step such small parameters.

    Raises:
        ClosureEvaluatedAgainError: It evaluates its closure more than once per step.
    """
    first = _try(optimizer, remainder=0)
    return _try(optimizer, remainder=1) if first.alike else first


def steps_shards_as_whole(optimizer: Optimizer, mesh: DeviceMesh) -> Trial:
    """Whether a step moves parameters that are DTensors, sharded by rows, as it moves whole ones. Collective.

    It may evaluate its closure as often as it likes.

    Args:
        optimizer: Any optimizer.
        mesh: The ranks that share each parameter.
    """
    return _try(optimizer, mesh=mesh)


def _try(optimizer: Optimizer, remainder: int | None = None, mesh: DeviceMesh | None = None) -> Trial:
    with warnings.catch_warnings(), _random_numbers_kept(optimizer):
        warnings.simplefilter("ignore")
        try:
            whole, part = _copy(optimizer), _copy(optimizer, mesh)
            watched = [pair for pair in _pairs(whole, part, remainder) if pair[0].numel()]
            starts = [view.clone() for view, _ in watched]
            _step(whole, 0, once=mesh is None)
            _step(part, 0, once=mesh is None)
            alike = _moved_alike(watched, starts)
            if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
                # What a class of its own makes of loaded state must not depend on who else is there, either.
                part.optimizer.load_state_dict(part.optimizer.state_dict())
            _step(whole, 1, once=mesh is None)
            _step(part, 1, once=mesh is None)
        except ClosureEvaluatedAgainError:
            raise
        except Exception as error:
            # Whatever an optimizer may raise that does not expect such parameters, or cannot be copied.
            return Trial(None, " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR])
    if watched and all(torch.equal(view, start) for (view, _), start in zip(watched, starts, strict=True)):
        return Trial(None)
    return Trial(alike and _moved_alike(watched, starts))


def _moved_alike(watched: list[tuple[Tensor, Tensor]], starts: list[Tensor]) -> bool:
    return all(
        bool((one - _whole(other)).abs().max() <= _SAME * (one - start).abs().max())
        for (one, other), start in zip(watched, starts, strict=True)
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copy(optimizer: Optimizer, mesh: DeviceMesh | None = None) -> _Twin:
    """A deep copy in which every parameter has become a probe, wherever the optimizer refers to it.

    Given a mesh, probes that have rows are sharded by them.
    """
    # Not `copy.deepcopy(optimizer)`: torch's own copying leaves out whatever a subclass has added.
    twin = object.__new__(type(optimizer))
    # A scheduler's wrapper of `step` is bound to the optimizer, whose state may fill the memory.
    memo: dict[int, Any] = {id(optimizer): twin}
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = _sharded(_probe(parameter, generator), mesh)
    # Users' hooks are not meant for a copy, and may hold on to anything.
    twin.__dict__ = copy.deepcopy({**attributes_without_hooks(optimizer), "state": defaultdict(dict)}, memo)
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
    values = _whole(probe.detach()).cpu()
    size = 4.0 ** (number % 3)
    mesh = probe.device_mesh if isinstance(probe, DTensor) else None

    def scaled(scale: float) -> Tensor:
        noise = torch.randn(values.shape, generator=generator)
        gradient = (scale * size * (values + 0.5 + noise)).to(device=probe.device, dtype=probe.dtype)
        return _sharded(nn.Parameter(gradient), mesh).detach()

    return [[scaled(scale) for scale in scales] for scales in _GRADIENT_SCALES]


def _sharded(probe: nn.Parameter, mesh: DeviceMesh | None) -> nn.Parameter:
    if mesh is None or probe.dim() == 0:
        return probe
    return nn.Parameter(distribute_tensor(probe.detach(), mesh, [Shard(0)], src_data_rank=None))


def _probe(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(size, _LARGEST_DIMENSION) for size in parameter.shape]
    values = torch.randn(*shape, 2, generator=generator)
    # In 16 bits small steps would vanish, and large ones overflow; what depends on others does so in 32, too.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    data = torch.view_as_complex(values) if parameter.is_complex() else values[..., 0]
    return nn.Parameter(data.to(dtype=dtype, device=parameter.device, copy=True).contiguous())


def _pairs(whole: _Twin, part: _Twin, remainder: int | None) -> list[tuple[Tensor, Tensor]]:
    """What is compared of both: all parameters; or every other one, of which ``part`` then steps no others.

    In the second case each is replaced by a shard that is all of it.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    number = 0
    for group, ours, theirs in zip(part.optimizer.param_groups, whole.groups, part.groups, strict=True):
        group["params"] = []
        for one, other in zip(ours, theirs, strict=True):
            number += 1
            stepped = other
            if remainder is not None:
                if number % 2 != remainder:
                    continue
                stepped = nn.Parameter(other.detach().clone())
                part.gradients[stepped] = part.gradients[other]
            group["params"].append(stepped)
            pairs.append((one.detach(), stepped.detach()))
    return pairs


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


def _no_loss() -> Any:
    return torch.zeros(())


def _step(twin: _Twin, phase: int, once: bool) -> None:
    optimizer = twin.optimizer

    for number in range(len(_GRADIENT_SCALES[phase])):
        for probe, gradients in twin.gradients.items():
            probe.grad = gradients[phase][number].clone()
        # Not `optimizer.step`, which a scheduler may have wrapped.
        with without_step_hooks(optimizer):
            evaluated: Callable[[], Any] = OneEvaluation(_no_loss, type(optimizer).__name__) if once else _no_loss
            type(optimizer).step(optimizer, closure=evaluated)


def check_parameters(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuses parameters that cannot be bucketed, before anything is moved.

    Raises:
        ValueError: Several devices, a sparse layout, or a module that makes sparse gradients.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the optimizers are on several devices: {devices}. Each rank must hold all of them on"
            " one: leave the placement to the Trainer, or use a model-parallel strategy."
        )
    for parameter in parameters:
        if parameter.layout != torch.strided:
            name = names.get(parameter, "<not in the module>")
            raise ValueError(f"Parameter {name!r} has layout {parameter.layout}; only dense ones can be sharded.")
    trained = set(parameters)
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight in trained:
            raise ValueError(
                f"{type(child).__name__} {name!r} makes sparse gradients, and only dense ones can be sharded."
                " Use `sparse=False`, or `strategy='ddp'`."
            )
