"""What of torch is private, and used all the same: each name with what it is for."""

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule


def is_compiled(module: nn.Module) -> bool:
    """Whether code was made of the module that reads parameters by itself, or depends on their class."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    return any(
        isinstance(child, (OptimizedModule, torch.jit.ScriptModule)) or child._compiled_call_impl is not None
        for child in module.modules()
    )


def profiler_is_enabled() -> bool:
    """Whether ``torch.profiler`` (or its predecessor) records what this thread does."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
