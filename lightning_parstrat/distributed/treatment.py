"""What can be sharded, and how; what every rank steps whole instead, as under DDP.

Nothing is refused that can be had with DDP's memory: an optimizer that looks at all parameters together is left as it
is, on every rank, with averaged gradients in ``param.grad``.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.layout import Partition
from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.core.update_cost import elementwise, newton_schulz
from lightning_parstrat.distributed.probe import steps_elements_alone, steps_parameters_alone
from lightning_parstrat.distributed.sharding import (
    ELEMENTWISE_OPTIMIZERS,
    ClosureEvaluatedAgainError,
    original_class,
)


class Treatment(NamedTuple):
    """How an optimizer's parameters are partitioned; None where every rank steps them whole, for ``reason``."""

    partition: Partition | None
    reason: str = ""


def choose_treatment(optimizer: Optimizer, choice: PartitionChoice) -> Treatment:
    """How to shard ``optimizer``, if it can be.

    ``"auto"`` cuts parameters only for torch's element-wise optimizers; any other keeps them whole on one rank, and is
    tried out first (see :func:`steps_parameters_alone`). Not collective.

    Args:
        optimizer: Not sharded yet.
        choice: The user's; a partition by name is a promise that the optimizer's parameters can be told apart.

    Raises:
        ValueError: The optimizer evaluates its closure again or wants sparse gradients, or ``"element"`` was asked for
            and its update of an element looks at others.
    """
    if not isinstance(optimizer, Optimizer):
        return Treatment(None, "it is no torch.optim.Optimizer")
    _check_supported(optimizer)
    cls = original_class(optimizer)
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return Treatment(None, "its `step` was replaced on the object")
    if cls.state_dict is not Optimizer.state_dict:
        return Treatment(None, "it saves its state in a way of its own")
    if hasattr(cls, "train") and hasattr(cls, "eval"):
        return Treatment(None, "its `train` and `eval` change parameters outside of `step`")
    if cls in ELEMENTWISE_OPTIMIZERS:
        return Treatment("element" if choice == "auto" else choice)
    try:
        if choice == "element":
            _check_elementwise(optimizer)
        return _try_out(optimizer) if choice == "auto" else Treatment(choice)
    except ClosureEvaluatedAgainError as error:
        raise ValueError(str(error)) from None


def parameters_kept_whole(module: nn.Module, optimizers: Sequence[Optimizer]) -> set[Tensor]:
    """Parameters of ``optimizers`` that cannot move into a bucket, so that every rank steps them.

    Those that share memory with another parameter or buffer without being the same, those that DDP is told to ignore,
    and those of dtypes that have no gradients.
    """
    parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ignored_tensors = {parameter for name, parameter in module.named_parameters() if name in ignored}
    unmovable = {p for p in parameters if not (p.is_floating_point() or p.is_complex())}
    sharing = _sharing_memory([*parameters, *module.parameters(), *module.buffers()])
    return parameters & (ignored_tensors | unmovable | sharing)


def update_cost(optimizer: Optimizer, parameter: Tensor) -> float:
    """What stepping ``parameter`` costs, in operations, so that several optimizers' can be weighed together."""
    if isinstance(optimizer, torch.optim.Muon):
        steps = next(
            group["ns_steps"] for group in optimizer.param_groups if any(p is parameter for p in group["params"])
        )
        return newton_schulz(parameter.shape, steps)
    return elementwise(parameter.numel())


def _check_supported(optimizer: Optimizer) -> None:
    cls = original_class(optimizer)
    closure = inspect.signature(cls.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{cls.__name__} evaluates its closure more than once per step, which sharded optimizer state does not"
            " allow. Choose an optimizer whose `step()` works without a closure, or `strategy='ddp'`."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{cls.__name__} works on sparse gradients, and only dense ones can be sharded. Use Adam with"
            " `nn.Embedding(..., sparse=False)`, or `strategy='ddp'`."
        )


def _check_elementwise(optimizer: Optimizer) -> None:
    if steps_elements_alone(optimizer) is False:
        raise ValueError(
            f"partition='element' was asked for, but {original_class(optimizer).__name__} steps a part of a parameter"
            " otherwise than the whole: cut into shards it would train differently. Use partition='auto' or"
            " 'parameter'."
        )


def _try_out(optimizer: Optimizer) -> Treatment:
    alone = steps_parameters_alone(optimizer)
    if alone:
        return Treatment("parameter")
    if alone is None:
        return Treatment(
            None, "it could not be tried out whether it steps each parameter alone (partition='parameter' says it does)"
        )
    return Treatment(None, "its step of one parameter depends on the others")


def _sharing_memory(tensors: Sequence[Tensor]) -> set[Tensor]:
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
