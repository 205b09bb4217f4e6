"""Which optimizers can step the shards of a module: those that step them as they step whole parameters."""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.zero1.shardability import check_supported, steps_shards_as_whole
from lightning_parstrat.distributed.zero1.state import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.zero1.stepping import needs_closure
from lightning_parstrat.distributed.zero3.held_parameters import HeldParameter


def check_optimizers(optimizers: Iterable[Optimizer], control: Collectives) -> None:
    """Refuses what cannot step shards. Collective.

    Takes milliseconds for each that torch does not ship: a copy steps a few small parameters, whole
    and sharded, and both must end alike.

    Args:
        optimizers: Those of a sharded module.
        control: Agrees on what ranks have found.

    Raises:
        ValueError: One of them cannot be used; the message says which, why, and what can.
    """
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(isinstance(parameter, HeldParameter) for parameter in parameters):
            raise ValueError(
                f"{type(optimizer).__name__} was made of parameters that have been replaced by sharded ones since."
                " Make it in `configure_optimizers`, of `self.parameters()`."
            )
        mesh = next((parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)), None)
        check_supported(optimizer)
        if mesh is None or type(optimizer) in ELEMENTWISE_OPTIMIZERS:
            continue
        reason = _reason_against(optimizer, mesh)
        if any_rank(reason is not None, control):
            raise ValueError(
                f"{type(optimizer).__name__} cannot step sharded parameters: {reason or 'it failed on another rank'}."
                " Use one that moves each element by itself, such as torch.optim.AdamW, or strategy='zero1_custom',"
                " which leaves each matrix whole on one rank."
            )


def _reason_against(optimizer: Optimizer, mesh: DeviceMesh) -> str | None:
    if needs_closure(optimizer):
        return "its `step` needs a closure, and looks at all parameters as one vector"
    if isinstance(optimizer, (torch.optim.Adafactor, torch.optim.Muon)):
        return "its update of an element looks at others"
    alike, error = steps_shards_as_whole(optimizer, mesh)
    if alike:
        return None
    if alike is not None:
        return "on small ones it went otherwise than with whole parameters"
    return f"trying it on small ones failed ({error})" if error else "its `step` moved nothing when it was tried"
