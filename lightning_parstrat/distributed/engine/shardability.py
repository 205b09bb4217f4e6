"""Which optimizers and parameters can be sharded, and how. All others are replicated, as under DDP.

If DDP's memory suffices, nothing is refused. An optimizer that combines parameters is left unchanged, on every rank.
Averaged gradients are in ``param.grad``.
"""

import copy
import inspect
import math
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_parstrat.core.layout import Partition
from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.engine.cuts import whole
from lightning_parstrat.distributed.engine.state import ELEMENTWISE_OPTIMIZERS, grouped_parameters
from lightning_parstrat.distributed.engine.stepping import (
    METHODS,
    ClosureEvaluatedAgainError,
    evaluated_once,
    needs_closure,
)
from lightning_parstrat.distributed.torch_compat import (
    attributes_without_hooks,
    has_memory,
    is_step_replaced,
    names_ignored_by_ddp,
    takes_hooks,
    without_step_hooks,
)

_AGAIN = "evaluates the closure again within a step, on all parameters"
_FAILED = "trying it on a copy failed"
_MOVED_NOTHING = "its `step` moved nothing when it was tried on a copy"
UNTRIED = (_FAILED, _MOVED_NOTHING)
"""How reasons begin that do not tell what the optimizer does."""
_LARGEST_DIMENSION = 8
_PARAMETERS_PER_GROUP = 16
_GRADIENT_SCALES = ((1e-3,) * 3, (1.0,) * 20, (1e3, 1e-3, 1.0, 1.0, 1.0))
"""Scales of gradients, in phases that are compared by themselves. At first, what is at most 1 depends on gradients. At
last, one is so large that a global clip acts. Between them are as many as an optimizer may need that clips by what it
has seen in ten steps."""
_SMALLEST_LEARNING_RATE = 1e-3
_LONGEST_ERROR = 100
"""Characters of an error's text, in a message of one line."""
_SAME = 1e-3
"""Relative to the largest step of a parameter. Rounding stays far below, any dependence seen far above."""


class ShardingDecision(NamedTuple):
    """How an optimizer's parameters are partitioned. If they are replicated for ``reason``, None."""

    partition: Partition | None
    reason: str = ""


def decide_sharding(optimizer: Optimizer, choice: PartitionChoice) -> ShardingDecision:
    """How to shard ``optimizer``, if it can be.

    ``"auto"`` cuts parameters only for torch's element-wise optimizers. Any other optimizer keeps them uncut on one
    rank, and is tried out first (see :func:`reason_against_parts`). Not collective.

    Args:
        optimizer: Not sharded yet.
        choice: The user's choice. ``"parameter"`` is a promise that the optimizer steps each parameter alone.

    Raises:
        ValueError: ``"element"`` was chosen for an optimizer that is not one of torch's element-wise ones.
    """
    if not isinstance(optimizer, Optimizer):
        return ShardingDecision(None, "it is no torch.optim.Optimizer")
    cls = type(optimizer)
    obstacle = _obstacle(optimizer)
    if obstacle:
        return ShardingDecision(None, obstacle)
    if cls in ELEMENTWISE_OPTIMIZERS:
        return ShardingDecision("element" if choice == "auto" else choice)
    if choice == "element":
        raise ValueError(
            f"partition='element' was asked for, but {cls.__name__} is none of torch's optimizers that step each"
            " element by itself, as AdamW does. Cut into shards, it might train differently. Use partition='auto' or"
            " 'parameter'."
        )
    reason = reason_against_parts(optimizer) if choice == "auto" else ""
    if reason.startswith(_FAILED):
        # An optimizer that moves nothing may use a gradient in the middle of a step: a promise would train it wrong.
        reason += ", and partition='parameter' was not set"
    return ShardingDecision(None if reason else "parameter", reason)


def _obstacle(optimizer: Optimizer) -> str:
    """The reason against sharding it with any parameters. Empty if there is none."""
    cls, replaced = type(optimizer), _replaced_method(optimizer)
    if not takes_hooks(optimizer):
        return "its class does not call `Optimizer.__init__`"
    if replaced is not None:
        return f"its `{replaced}` was replaced on the object, not overridden by a subclass"
    if cls.state_dict is not Optimizer.state_dict:
        return "its class has its own `state_dict`"
    if needs_closure(cls):
        return f"its `step` needs a closure, and {_AGAIN}"
    if not cls.__module__.startswith("torch."):
        kinds = {type(one) for one in grouped_parameters(optimizer) if one.requires_grad}
        if own := [kind.__name__ for kind in kinds if nn.Parameter in kind.__mro__[1:]]:
            return f"it may treat parameters of the class {listed(sorted(own))} in another way than others"
        if any("param_names" in group for group in optimizer.param_groups):
            return "its groups have `param_names`, and a rank would step a part of them"
    if hasattr(cls, "train") and hasattr(cls, "eval"):
        return "its `train` and `eval` change parameters outside of `step`"
    return ""


def _replaced_method(optimizer: Optimizer) -> str | None:
    """A method that sharding would replace, if the user's is not an ordinary method of the class."""
    own = vars(optimizer)
    for name in sorted(METHODS):
        if is_step_replaced(optimizer) if name == "step" else name in own:
            return name
        if isinstance(inspect.getattr_static(type(optimizer), name), property):
            return name
    return None


def immovable_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> set[Tensor]:
    """Parameters of ``optimizers`` that cannot move into a bucket, so that every rank steps them.

    These are parameters that share memory with another parameter or buffer without being the same. Parameters that DDP
    ignores and parameters of dtypes without gradients are the others.
    """
    parameters = {parameter for optimizer in optimizers for parameter in grouped_parameters(optimizer)}
    ignored = names_ignored_by_ddp(module)
    ignored_tensors = {parameter for name, parameter in module.named_parameters() if name in ignored}
    unmovable = {p for p in parameters if not (p.is_floating_point() or p.is_complex())}
    sharing = sharing_memory([*parameters, *module.parameters(), *module.buffers()])
    return parameters & (ignored_tensors | unmovable | sharing)


def sharing_memory(tensors: Sequence[Tensor]) -> set[Tensor]:
    """The tensors of ``tensors`` whose memory overlaps that of another one among them."""
    strided = (one for one in dict.fromkeys(tensors) if one.layout == torch.strided)
    distinct = [one for one in strided if has_memory(one) and one.numel() > 0]
    extents = sorted((*_extent(tensor), number) for number, tensor in enumerate(distinct))
    sharing: set[Tensor] = set()
    last_stop, last = -1, -1
    for start, stop, number in extents:
        if start < last_stop:
            sharing |= {distinct[last], distinct[number]}
        if stop > last_stop:
            last_stop, last = stop, number
    return sharing


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, that a strided tensor may read."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def reason_against_parts(optimizer: Optimizer) -> str:
    """The reason why a step may not move each parameter by its own gradient and state, whatever else is stepped.

    The optimizer and its parameters are not changed. Not collective. It takes milliseconds: at most 16 parameters per
    group, none with a dimension beyond 8, 28 steps of each copy.

    Args:
        optimizer: Any optimizer with the class its user gave it.

    Returns:
        The reason. Empty if each parameter can be stepped alone. An optimizer that cannot be copied, or does not step
        such small parameters, has a reason.
    """
    return _try(optimizer, remainder=0) or _try(optimizer, remainder=1)


def reason_against_rows(optimizer: Optimizer, mesh: DeviceMesh) -> str:
    """The reason why a step may not move DTensors that are sharded by rows as it moves whole ones. Collective.

    The optimizer may evaluate its closure several times.

    Args:
        optimizer: Any optimizer.
        mesh: The ranks that share each parameter.
    """
    return _try(optimizer, mesh=mesh)


def _try(optimizer: Optimizer, remainder: int | None = None, mesh: DeviceMesh | None = None) -> str:
    with warnings.catch_warnings(), _random_numbers_kept(optimizer):
        warnings.simplefilter("ignore")
        try:
            whole, part = _copy(optimizer), _copy(optimizer, remainder, mesh)
            watched = [(whole.probes[n].detach(), one.detach()) for n, one in part.probes.items() if one.numel()]
            starts = [view.clone() for view, _ in watched]
            alike = keeps_alike = True
            for phase in range(len(_GRADIENT_SCALES)):
                begins = [view.clone() for view, _ in watched]
                _step(whole, phase, mesh)
                _step(part, phase, mesh)
                alike = alike and _moved_alike(watched, begins)
                if phase == 1:
                    keeps_alike = _are_close(_kept(whole), _kept(part))
                    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
                        # A class may load state in its own way. The result must not depend on other parameters, either.
                        part.optimizer.load_state_dict(part.optimizer.state_dict())
        except ClosureEvaluatedAgainError:
            return f"it {_AGAIN}"
        except Exception as error:
            # An optimizer may raise any error if it does not expect such parameters, or cannot be copied.
            parts = filter(None, (type(error).__name__, str(error)))
            shown = " ".join(": ".join(parts).split())[:_LONGEST_ERROR]
            return f"{_FAILED} ({shown})"
    if watched and all(torch.equal(view, start) for (view, _), start in zip(watched, starts, strict=True)):
        return _MOVED_NOTHING
    if not alike:
        return "the step of a part of the parameters depends on others"
    return "" if keeps_alike else "it keeps numbers that depend on all parameters"


def _moved_alike(watched: list[tuple[Tensor, Tensor]], starts: list[Tensor]) -> bool:
    return all(
        bool((one - whole(other)).abs().max() <= _SAME * (one - start).abs().max())
        for (one, other), start in zip(watched, starts, strict=True)
    )


def _kept(twin: "_Twin") -> list[float]:
    """The numbers that an optimizer keeps, beside the state of its parameters."""
    return list(_numbers({**attributes_without_hooks(twin.optimizer), "state": None}))


def _numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, (int, float)) or (isinstance(tree, Tensor) and tree.numel() == 1 and not tree.is_complex()):
        yield float(tree)
    elif isinstance(tree, (dict, list, tuple, deque)) and not isinstance(tree, Tensor):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from () if isinstance(value, nn.Parameter) else _numbers(value)


def _are_close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=_SAME) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(some, others, strict=True)
    )


class _Twin(NamedTuple):
    """A copy of an optimizer that steps ``probes``, by their numbers."""

    optimizer: Optimizer
    probes: dict[int, nn.Parameter]


def _copy(optimizer: Optimizer, remainder: int | None = None, mesh: DeviceMesh | None = None) -> _Twin:
    """A deep copy in which every parameter is replaced by a probe, everywhere in the optimizer.

    Args:
        optimizer: The optimizer.
        remainder: If given, the copy steps every other probe, each in the place of a shard that is all of it.
        mesh: If given, probes that have rows are sharded by them.
    """
    # Not `copy.deepcopy(optimizer)`: torch's own copying omits what a subclass has added.
    twin = object.__new__(type(optimizer))
    # A scheduler's wrapper of `step` is bound to the optimizer, whose state may fill the memory.
    memo: dict[int, Any] = {id(optimizer): twin}
    generator = torch.Generator().manual_seed(0)
    attributes: dict[Tensor, dict[str, Any]] = {}
    for parameter in grouped_parameters(optimizer):
        memo[id(parameter)] = probe = _sharded(_probe(parameter, generator), mesh)
        attributes[probe] = vars(parameter)
    # Users' hooks are not meant for a copy, and may refer to anything.
    twin.__dict__ = copy.deepcopy({**attributes_without_hooks(optimizer), "state": defaultdict(dict)}, memo)
    probes: dict[int, nn.Parameter] = {}
    number = 0
    for group in twin.param_groups:
        if "lr" in group:
            # Above zero. At the start of a warm-up it is often zero, and the trial needs movement.
            rate, least = group["lr"], _SMALLEST_LEARNING_RATE
            group["lr"] = rate.clamp(min=least) if isinstance(rate, Tensor) else max(rate, least)
        # Some parameters of every shape, and the last as well as the first.
        stride = max(1, len(group["params"]) // _PARAMETERS_PER_GROUP)
        chosen = dict(enumerate(group["params"][::-1][::stride][:_PARAMETERS_PER_GROUP], number))
        number += len(chosen)
        for probe in chosen.values():
            for name, value in attributes[probe].items():
                with suppress(Exception):
                    # What cannot be copied may still be read.
                    vars(probe)[name] = value
                    vars(probe)[name] = copy.deepcopy(value, memo)
        if remainder is not None:
            chosen = {n: _shard(one) for n, one in chosen.items() if n % 2 == remainder}
        group["params"] = list(chosen.values())
        probes.update(chosen)
    return _Twin(twin, probes)


def _shard(probe: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(probe.detach().clone())
    made.__dict__ = vars(probe)
    return made


def _gradient(probe: nn.Parameter, number: int, step: int, scale: float) -> Tensor:
    """The gradient of one step. Sizes differ between probes, and directions change a little between steps."""
    base = torch.randn(probe.shape, generator=torch.Generator().manual_seed(number))
    noise = torch.randn(probe.shape, generator=torch.Generator().manual_seed(1000 * number + step + 1))
    gradient = (scale * 4.0 ** (number % 3) * (base + 0.5 + noise)).to(device=probe.device, dtype=probe.dtype)
    return _sharded(nn.Parameter(gradient), probe.device_mesh if isinstance(probe, DTensor) else None).detach()


def _sharded(probe: nn.Parameter, mesh: DeviceMesh | None) -> nn.Parameter:
    if mesh is None or probe.dim() == 0:
        return probe
    return nn.Parameter(distribute_tensor(probe.detach(), mesh, [Shard(0)], src_data_rank=None))


def _probe(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(size, _LARGEST_DIMENSION) for size in parameter.shape]
    values = torch.randn(*shape, 2, generator=generator)
    # In 16 bits small steps would vanish, and large ones overflow. A dependence also shows in 32 bits.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    data = torch.view_as_complex(values) if parameter.is_complex() else values[..., 0]
    return nn.Parameter(data.to(dtype=dtype, device=parameter.device, copy=True).contiguous())


@contextmanager
def _random_numbers_kept(optimizer: Optimizer) -> Iterator[None]:
    """Within it, a step's random numbers do not change those of the training."""
    devices = {one.device.index for one in grouped_parameters(optimizer) if one.device.type == "cuda"}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)


def _no_loss() -> Any:
    return torch.zeros(())


def _step(twin: _Twin, phase: int, mesh: DeviceMesh | None) -> None:
    for step, scale in enumerate(_GRADIENT_SCALES[phase]):
        for number, probe in twin.probes.items():
            probe.grad = _gradient(probe, number, 100 * phase + step, scale)
        # Not `optimizer.step`, which a scheduler may have wrapped.
        with without_step_hooks(twin.optimizer):
            cls = type(twin.optimizer)
            # Sharded parameters may be stepped by an optimizer that evaluates its closure again.
            closure: Callable[[], Any] = _no_loss if mesh is not None else evaluated_once(_no_loss, cls.__name__)
            cls.step(twin.optimizer, closure=closure)


def check_parameters(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raises an error for parameters that cannot be bucketed, before anything is moved.

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
