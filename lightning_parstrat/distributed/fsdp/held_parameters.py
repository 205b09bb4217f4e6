"""A parameter that your code took from a module before sharding. Its use raises an error with the parameter's name.

FSDP2 replaces each parameter by a shard. A list, a closure or a callback may still hold the old object, with old
values. That object becomes a :class:`HeldParameter`, which has no memory.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

_DESCRIPTIONS: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
}
"""Functions that need no values, and whose result is that of the parameter that has replaced the object."""

_REPLACED = "_replaced"
"""The attribute with the identity of a held parameter: its module, its name there, its whole name."""


class HeldParameter(nn.Parameter):
    """A former parameter of a module that is now sharded. Never instantiated: :func:`refuse_uses` swaps classes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = [*args, *(kwargs or {}).values()]
        held = [two for one in given for two in (one if isinstance(one, (list, tuple)) else (one,))]
        name = next((vars(one)[_REPLACED][2] for one in held if isinstance(one, HeldParameter)), "layer.weight")
        raise RuntimeError(
            f"Parameter {name!r} was used through an object that your code has held since before the training, when the"
            " parameter was sharded: the object has no values. Make optimizers in `configure_optimizers`. Elsewhere use"
            f" `self.{name}`, which is whole where it is gathered: in the `forward` of the block that holds it; in"
            " `training_step` if no block does; or within `trainer.strategy.full_parameters()`, which all ranks enter."
        )

    # Copies of an object that holds it get the parameter that has replaced it.
    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module, own, _ = vars(self)[_REPLACED]
        return copy.deepcopy(getattr(module, own), memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        module, own, _ = vars(self)[_REPLACED]
        return getattr(module, own).__reduce_ex__(protocol)


@torch.no_grad()
def refuse_uses(old: Tensor, root: nn.Module, name: str) -> None:
    """Makes uses of a replaced parameter raise from now on. Not collective.

    Args:
        old: The object that was registered as ``name`` until now.
        root: A module.
        name: The name of the parameter in ``root``, such as ``"layer.weight"``.
    """
    path, _, own = name.rpartition(".")
    # Code in C++ does not ask the class: it finds a tensor whose memory was freed, and raises.
    old.data = torch.empty_like(old)
    old.untyped_storage().resize_(0)
    old.grad = None
    vars(old)[_REPLACED] = root.get_submodule(path), own, name
    old.__class__ = HeldParameter
