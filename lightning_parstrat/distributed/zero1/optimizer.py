"""torch optimizers, stepping on this rank's shard: the same object, of the same class, with a few methods of its own.

Users, schedulers and callbacks go on seeing their class, and the full parameters in ``param_groups``; only while the
class's ``step`` runs (or gradients are unscaled or clipped) do the groups hold this rank's shards instead. The methods
that differ are on the instance, where Python finds them before the class's, and so is what is known of its sharding:
``optimizer._sharding``.

A call by the class goes around them. A step taken so is refused (``stepping.py``); of the others it cannot be known.
"""

import functools
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, without_step_hooks
from lightning_parstrat.distributed.zero1.optimizer_sharding import OptimizerSharding, is_sharded, sharding_of
from lightning_parstrat.distributed.zero1.state import StateLeftOut, load_sharded, replicated_state_dict
from lightning_parstrat.distributed.zero1.stepping import refuse_step_of_class, stepping_by


def _of_class(optimizer: Optimizer, name: str) -> Any:
    """What ``optimizer`` would find without methods of its own; a test's mock, which is not bound, among it."""
    found = next(vars(base)[name] for base in type(optimizer).__mro__ if name in vars(base))
    return found.__get__(optimizer) if hasattr(found, "__get__") else found


def _steps_shards(self: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
    """Steps this rank's shards by the class's ``step``, and gathers the parameters. Collective.

    The closure (forward, backward and clipping) is evaluated when the class asks for it, on the full parameters.
    """
    sharding = sharding_of(self)
    original = _of_class(self, "step")
    if sharding.attached:
        return sharding.step(self, original, closure, arguments)
    # Its training has ended: it goes on as an ordinary optimizer.
    unsharded = unshard(self)
    self.load_state_dict(unsharded)  # type: ignore[arg-type]
    with without_step_hooks(self):
        return original(**arguments) if closure is None else original(closure=closure, **arguments)


def _zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Zeroes the full parameters' gradients and the reduced ones of the shards. Arguments are the class's."""
    _of_class(self, "zero_grad")(*args, **kwargs)
    sharding = sharding_of(self)
    if sharding.attached:
        set_to_none = bool(kwargs.get("set_to_none", args[0] if args else True))
        sharding.reducer.zero(set(sharding.slots.values()), set_to_none)


def _add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
    """Adds the group and buckets its parameters. Collective: all ranks add the same group."""
    _of_class(self, "add_param_group")(param_group)
    sharding = sharding_of(self)
    if sharding.attached:
        sharding.adopt_added_parameters()


def _state_dict(self: Optimizer) -> dict[str, Any]:
    """The unsharded state on every rank, in torch's own format and on the host. Collective."""
    return replicated_state_dict(self)


def _load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads unsharded state in torch's format, of which this rank keeps its shards; see :func:`load_sharded`."""
    load_sharded(self, state_dict, _of_class(self, "load_state_dict"))


def _reduce_ex(self: Optimizer, protocol: Any) -> Any:
    """Copies and pickles are ordinary optimizers without state: this rank has only a part of it."""
    return _make_copy, (type(self), self.defaults, self.param_groups)


_FOR_WRAPPERS: dict[str, Callable[..., Any]] = {
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "step": stepping_by(_steps_shards),
    "__reduce_ex__": _reduce_ex,
}
_METHODS = {**_FOR_WRAPPERS, **_OTHERS}
METHODS: frozenset[str] = frozenset(_METHODS)
"""The methods that a sharded optimizer has on the instance."""


def shard_optimizer(optimizer: Optimizer, sharding: OptimizerSharding) -> None:
    """Puts the methods on an optimizer that :func:`decide_sharding` wants sharded.

    Args:
        optimizer: The optimizer.
        sharding: What it is to know of its sharding, which finds its buckets later.
    """
    vars(optimizer)["_sharding"] = sharding
    _bind_methods(optimizer)


def lend_methods(optimizer: Optimizer, wrapper: Any) -> None:
    """Has a wrapper that inherits the optimizer's class use the sharded optimizer's methods, but for ``step``."""
    if is_sharded(optimizer):
        methods = sharding_of(optimizer).methods
        vars(wrapper).update({name: methods[name] for name in _FOR_WRAPPERS})


def _bind_methods(optimizer: Optimizer) -> None:
    sharding = sharding_of(optimizer)
    sharding.methods = {name: _bound(name, optimizer) for name in _METHODS}
    # Only a scheduler's wrapper can be there: what a user has replaced is not sharded.
    sharding.wrapped_step = vars(optimizer).get("step")
    if sharding.wrapped_step is not None:
        mark_as_wrapped(sharding.methods["step"].__func__)
    # Not by `setattr`, which a class may have overridden.
    vars(optimizer).update(sharding.methods)
    sharding.guard = optimizer.register_step_pre_hook(refuse_step_of_class)


def _bound(name: str, optimizer: Optimizer) -> types.MethodType:
    """A method with the signature of the class's; and that one for who still has it after the sharding has ended."""

    @functools.wraps(getattr(type(optimizer), name))
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _METHODS[name](self, *args, **kwargs) if is_sharded(self) else _of_class(self, name)(*args, **kwargs)

    return types.MethodType(method, optimizer)


def _refuse_without_state(optimizer: Optimizer, *_: Any) -> None:
    """A hook before the step of a copy: one that keeps no state would not find it missing."""
    len(optimizer.state)


def _make_copy(cls: type[Optimizer], defaults: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    optimizer: Optimizer = cls.__new__(cls)
    optimizer.__setstate__({"defaults": defaults, "param_groups": groups, "state": {}})
    optimizer.state = StateLeftOut()
    optimizer.register_step_pre_hook(_refuse_without_state)
    return optimizer


def unshard(optimizer: Optimizer) -> dict[str, Any] | None:
    """Undoes the sharding of an earlier training, if there was one, and leaves the state empty. Collective.

    Returns:
        The optimizer's unsharded state, in host memory, to be loaded; or None where it had not been sharded.
    """
    if not is_sharded(optimizer):
        return None
    state_dict = optimizer.state_dict()
    optimizer.state = defaultdict(dict)
    own, sharding = vars(optimizer), sharding_of(optimizer)
    for name, method in sharding.methods.items():
        # A scheduler or the user may have wrapped it since.
        if own.get(name) is method:
            del own[name]
    if sharding.wrapped_step is not None:
        own.setdefault("step", sharding.wrapped_step)
    sharding.guard.remove()
    del own["_sharding"]
    return state_dict
