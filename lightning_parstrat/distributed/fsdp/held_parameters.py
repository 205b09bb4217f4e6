"""A parameter that your code took from a module before sharding. Its use raises an error with the parameter's name.

FSDP2 replaces each parameter by a shard. A list, a closure or a callback may still hold the old object, with old
values. That object becomes a :class:`HeldParameter`, which has no memory.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


class HeldParameter(nn.Parameter):
    """A former parameter of a module that is now sharded. Never instantiated: :func:`refuse_uses` swaps classes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        held = [two for one in given for two in (one if isinstance(one, (list, tuple)) else (one,))]
        name = next((vars(one)[_NAME] for one in held if isinstance(one, HeldParameter)), "layer.weight")
        raise RuntimeError(
            f"Parameter {name!r} was used through an object from before the training. It has no values since the"
            " parameter was sharded. Make optimizers in `configure_optimizers`. Elsewhere use"
            f" `self.{name}`. It is whole in the `forward` of its block, or in `training_step` if it is in no block."
            " All ranks may also enter `trainer.strategy.full_parameters()`."
        )


_NAME = "_name_in_module"


@torch.no_grad()
def refuse_uses(old: Tensor, name: str) -> None:
    """Makes uses of a replaced parameter raise from now on, and frees its memory. Not collective.

    Args:
        old: The object that was registered as ``name`` until now.
        name: The name of the parameter in the root, such as ``"layer.weight"``.
    """
    # Code in C++ does not ask the class: it finds a tensor whose memory was freed, and raises.
    old.data = torch.empty_like(old)
    old.untyped_storage().resize_(0)
    old.grad = None
    vars(old)[_NAME] = name
    old.__class__ = HeldParameter
