"""The properties of a training that ``lightning-parstrat tune`` reads: its size, its machine and its memory."""

import os
import platform
import resource
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.engine.state import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.fsdp.tensor_plan import TensorPlanError, find_plan


def measured_for(module: LightningModule, strategy: DDPStrategy) -> dict[str, Any]:
    """The properties that a measurement of steps depends on."""
    return {
        "parameters": sum(one.numel() for one in module.parameters() if one.requires_grad),
        "precision": str(module.trainer.precision),
        "accumulate_grad_batches": module.trainer.accumulate_grad_batches,
        "nodes": strategy.num_nodes,
        "devices": strategy.world_size // strategy.num_nodes,
        "machine": torch.cuda.get_device_name()
        if strategy.root_device.type == "cuda"
        else f"{platform.machine()}, {counted(os.cpu_count() or 1, 'core')}",
    }


def memory_of(module: LightningModule, strategy: DDPStrategy) -> dict[str, Any]:
    """The properties that a prediction of memory depends on.

    Returns:
        ``peak``: The most bytes that this rank has had. ``memory``: Bytes of its device, or its part of the host's.
        ``values``: Values of optimizer state per parameter. ``cut``: Elements of layers that a tensor-parallel plan
        names, or 0 if there is no plan.
    """
    if strategy.root_device.type == "cuda":
        memory = torch.cuda.get_device_properties(strategy.root_device).total_memory
    else:
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = of_host * strategy.num_nodes // strategy.world_size
    try:
        planned = find_plan(module, 2, ())
    except TensorPlanError:
        planned = []
    known = [state_bytes_per_parameter_byte(one) for one in strategy.optimizers]
    return {
        "peak": peak_bytes(strategy.root_device),
        "memory": memory,
        "values": max((one for one in known if one is not None), default=2.0),
        "cut": sum(parameter.numel() for one in planned for parameter in one.layer.parameters()),
    }


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had, on a GPU or on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
