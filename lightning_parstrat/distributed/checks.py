"""What cannot be sharded is refused here, before anything is moved."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.layout import ParameterSpec, fingerprint
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.backends import make_collectives
from lightning_parstrat.distributed.collectives import Collectives


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


def check_same_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares names, shapes and dtypes of parameters and buffers over all ranks, before any of them is broadcast.

    Collective; one all-reduce of 16 bytes. Names in ``module._ddp_params_and_buffers_to_ignore`` are left out.

    Args:
        module: The module.
        group: A group that works on host memory.

    Raises:
        ValueError: The modules differ, so that a broadcast between them would hang; or a parameter has no shape yet.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name!r} of a lazy module has no shape yet, so that ranks could not agree on it. Run a batch through"
                " the module before `fit`, for instance in `configure_model`."
            )
    specs = [
        ParameterSpec(
            name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), itemsize=tensor.element_size(), group=None
        )
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in ignored
    ]
    check_agreement(make_collectives(group, torch.device("cpu")), fingerprint(specs, ()))


def extremes_over_ranks(number: int, control: Collectives) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers. Collective; one all-reduce of 16 bytes."""
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    largest, smallest = extremes.tolist()
    return largest, -smallest


def check_agreement(control: Collectives, number: int) -> None:
    """Compares a number over all ranks. Collective; one all-reduce of 16 bytes.

    Raises:
        ValueError: The ranks have different numbers, that is, different parameters or plans.
    """
    largest, smallest = extremes_over_ranks(number, control)
    if largest != smallest:
        raise ValueError(
            "The ranks do not have the same parameters in the same order, so they cannot share their optimizer state."
            " Build the same module and the same optimizers on every rank (check code that depends on the rank)."
        )


def topology_of_ranks(node: str, control: Collectives) -> Topology:
    """Which ranks share a node. Collective; one all-reduce of 8 bytes per rank.

    Args:
        node: What this rank's node is called: the same on its ranks, different on all others.
        control: Works on host memory.
    """
    keys = torch.zeros(control.world_size, dtype=torch.int64)
    keys[control.rank] = int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big") >> 2
    control.all_reduce(keys).wait()
    return Topology.of(keys.tolist())
