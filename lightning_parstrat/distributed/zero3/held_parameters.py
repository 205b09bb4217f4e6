"""A parameter that your code took from a module before it was sharded: it acts as the module's own parameter.

FSDP2 replaces each parameter by a shard. A list, a closure or a callback may still hold the old object. That object
becomes a :class:`HeldParameter`. torch hands it every operation on it. It passes the operation on to the parameter that
the module has now. It keeps no memory of its own. If the module's parameter is sharded at that moment, an
operation on values raises an error.
"""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.zero1.read_guard import NEEDS_NO_CONTENT

_SET_DATA: Any = Tensor.data
_PLACE = "_parameter_of"
"""The attribute that says which parameter a held one stands for: its module, its name there, its whole name."""


class HeldParameter(nn.Parameter):
    """Stands for a parameter of a sharded module. Never instantiated: :func:`act_as_parameter_of` swaps classes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held: list[Tensor] = []

        def replace(tensor: Tensor) -> Tensor:
            if isinstance(tensor, HeldParameter):
                held.append(tensor)
            return current_parameter(tensor)

        current_args, current_kwargs = replace_leaves((args, kwargs or {}), replace)
        if not held:
            # It is hidden in an object of the caller's.
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func not in NEEDS_NO_CONTENT:
            for one in held:
                _check_is_whole(one)
        if func == _SET_DATA.__set__:
            current_args[0].data = current_args[1]
            return None
        return func(*current_args, **current_kwargs)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(current_parameter(self), memo)

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return repr(current_parameter(self))

    def __getattr__(self, name: str) -> Any:
        # What only shards have, such as `full_tensor`.
        return getattr(current_parameter(self), name)


@torch.no_grad()
def act_as_parameter_of(old: Tensor, root: nn.Module, name: str) -> None:
    """Has a parameter that was replaced act as the one that took its place, and frees its memory. Not collective.

    Args:
        old: Was registered as ``name`` until now.
        root: A module.
        name: Of the parameter in ``root``, such as ``"layer.weight"``.
    """
    path, _, own = name.rpartition(".")
    # Code in C++ does not ask the class. NaN shows there that the values are elsewhere.
    nothing = torch.nan if old.is_floating_point() or old.is_complex() else 0
    old.data = torch.full((), nothing, dtype=old.dtype, device=old.device).expand(old.shape)
    old.grad = None
    if old.requires_grad:
        old.register_hook(functools.partial(_refuse_gradient, name))  # type: ignore[no-untyped-call]
    vars(old)[_PLACE] = root.get_submodule(path), own, name
    old.__class__ = HeldParameter


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise RuntimeError(
        f"A gradient came to an object that your code has held since before the training, instead of to parameter"
        f" {name!r}. Code in C++ and `autograd.Function.apply` take the object as it is. Give them `self.{name}`."
    )


def current_parameter(tensor: Tensor) -> Tensor:
    """What a held parameter stands for now; any other tensor itself."""
    if not isinstance(tensor, HeldParameter):
        return tensor
    module, own, _ = vars(tensor)[_PLACE]
    current: Tensor = getattr(module, own)
    return current


def _check_is_whole(held: Tensor) -> None:
    if isinstance(current_parameter(held), DTensor):
        name = vars(held)[_PLACE][2]
        raise RuntimeError(
            f"Parameter {name!r} was used through an object that your code has held since before the training. Here"
            f" its values are sharded over the ranks, so the object has none. Use `self.{name}`, a DTensor, instead;"
            " or use the object where the parameter is gathered: in `training_step` if no block that is gathered by"
            " itself holds it, or within `trainer.strategy.full_parameters()`, which all ranks enter."
        )
