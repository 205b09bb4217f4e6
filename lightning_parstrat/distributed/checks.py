"""What cannot be sharded is refused here, before anything is moved."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.layout import ParameterSpec, fingerprint
from lightning_parstrat.distributed.collectives import Collectives, make_collectives


def check_parameters(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuses parameters that cannot be bucketed, before anything is moved.

    Raises:
        ValueError: Several devices, a dtype without gradients, or a module that makes sparse gradients.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the optimizers are on several devices: {devices}. Each rank must hold all of them on"
            " one: leave the placement to the Trainer, or use a model-parallel strategy."
        )
    seen: set[Tensor] = set()
    for parameter in parameters:
        name = names.get(parameter, "<not in the module>")  # type: ignore[call-overload]
        if parameter in seen:
            raise ValueError(
                f"Parameter {name!r} is in more than one optimizer, so that two shards would own it. Give each"
                " parameter to one optimizer, or use `strategy='ddp'`."
            )
        seen.add(parameter)
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"Parameter {name!r} is of {parameter.dtype}; only floating point and complex parameters can be"
                " trained. Register it as a buffer instead."
            )
        if parameter.layout != torch.strided:
            raise ValueError(f"Parameter {name!r} has layout {parameter.layout}; only dense ones can be sharded.")
    _check_overlap(parameters, names)
    trained = set(parameters)
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight in trained:
            raise ValueError(
                f"{type(child).__name__} {name!r} makes sparse gradients, and only dense ones can be sharded."
                " Use `sparse=False`, or `strategy='ddp'`."
            )


def _check_overlap(parameters: Sequence[Tensor], names: Mapping[Any, str]) -> None:
    """Two parameters over the same memory would each get a place of their own, and part from each other."""
    extents = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, names.get(parameter, "<not in the module>"))
        for parameter in parameters
        if parameter.numel() and parameter.device.type != "meta" and _is_dense(parameter)
    )
    for (_, end, name), (start, _, other) in pairwise(extents):
        if start < end:
            raise ValueError(
                f"Parameters {name!r} and {other!r} share memory without being the same nn.Parameter, which sharding"
                " would undo. Tie them by assigning the same nn.Parameter to both modules."
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def check_same_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares names, shapes and dtypes of parameters and buffers over all ranks, before any of them is broadcast.

    Collective; one all-reduce of 16 bytes. Names in ``module._ddp_params_and_buffers_to_ignore`` are left out.

    Args:
        module: The module.
        group: A group that works on host memory.

    Raises:
        ValueError: The modules differ; a broadcast between them would hang.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    specs = [
        ParameterSpec(
            name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), itemsize=tensor.element_size(), group=None
        )
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in ignored
    ]
    check_agreement(make_collectives(group, torch.device("cpu")), fingerprint(specs, ()))


def check_agreement(control: Collectives, number: int) -> None:
    """Compares a number over all ranks. Collective; one all-reduce of 16 bytes.

    Raises:
        ValueError: The ranks have different numbers, that is, different parameters or plans.
    """
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    if extremes[0] != -extremes[1]:
        raise ValueError(
            "The ranks do not have the same parameters in the same order, so they cannot share their optimizer state."
            " Build the same module and the same optimizers on every rank (check code that depends on the rank)."
        )
