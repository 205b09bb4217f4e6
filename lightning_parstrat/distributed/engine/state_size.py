"""How much state an optimizer will keep, before its first step."""

import inspect

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.state import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.torch_compat import without_step_hooks


def state_bytes_per_parameter_byte(optimizer: Optimizer) -> float | None:
    """How much state an element-wise optimizer keeps. A twin of it steps a small parameter to find out.

    Returns:
        Bytes of state per byte of parameters (AdamW: 2), averaged over groups. If it is unknown, None.
    """
    cls = type(optimizer)
    if cls not in ELEMENTWISE_OPTIMIZERS or not inspect.isfunction(inspect.unwrap(cls.step)):
        # A replacement of torch's function may count its calls.
        return None
    known = inspect.signature(cls).parameters
    state_bytes = parameter_bytes = 0
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(1024))
        probe.grad = torch.zeros_like(probe)
        options = {key: value for key, value in group.items() if key in known and key != "params"}
        try:
            twin = cls([probe], **{**options, "capturable": False} if "capturable" in known else options)
            # Hooks that a user has registered for all optimizers do not apply to this one.
            with without_step_hooks(twin):
                twin.step()
        except Exception:
            # Settings that only work on the user's device, such as a learning rate in a CUDA tensor.
            return None
        entries = [entry for entry in twin.state[probe].values() if isinstance(entry, Tensor)]
        size = sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
        parameter_bytes += size
        state_bytes += size * sum(entry.nbytes for entry in entries if entry.shape == probe.shape) // probe.nbytes
    return state_bytes / parameter_bytes if parameter_bytes else 0.0
