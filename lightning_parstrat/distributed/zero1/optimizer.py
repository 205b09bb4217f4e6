"""torch optimizers, stepping on this rank's shard: the same object, of the same class, with a few methods of its own.

Users, schedulers and callbacks go on seeing their class, and the full parameters in ``param_groups``; only while the
class's ``step`` runs (or gradients are unscaled or clipped) do the groups hold this rank's shards instead. The methods
that differ are on the instance, where Python finds them before the class's, and so is what is known of its sharding:
``optimizer._sharding``.

Whoever goes by the class passes them by. A step taken so is refused (``stepping.py``); of the others it cannot be told.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, without_step_hooks
from lightning_parstrat.distributed.zero1.gatherer import ParameterGatherer
from lightning_parstrat.distributed.zero1.optimizer_sharding import OptimizerSharding, is_sharded, sharding_of
from lightning_parstrat.distributed.zero1.reducer import GradientReducer
from lightning_parstrat.distributed.zero1.state import StateByShard, load_sharded, replicated_state_dict
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
    # Its training has ended, or it is a copy: it goes on as an ordinary optimizer.
    unsharded = unshard(self)
    self.load_state_dict(unsharded)  # type: ignore[arg-type]
    with without_step_hooks(self):
        return original(**arguments) if closure is None else original(closure=closure, **arguments)


_step = stepping_by(_steps_shards)


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


_COPIED = ("defaults", "state", "param_groups", "_sharding")


def _reduce_ex(self: Optimizer, protocol: Any) -> Any:
    """Copies and pickles hold this rank's part of the state; used on all ranks together, they become unsharded."""
    attributes = {name: vars(self)[name] for name in _COPIED}
    return _rebuild, (type(self), {**attributes, "state": dict(self.state)})


def _getstate(self: Optimizer) -> dict[str, Any]:
    """For ``copy.copy``, which asks the class how to copy: what it makes shares everything, methods included."""
    return {**{name: vars(self)[name] for name in _COPIED}, **sharding_of(self).methods}


def _while_sharded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, and the class's own for whoever still holds it when the optimizer is no longer sharded."""

    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if is_sharded(self) else _of_class(self, name)(*args, **kwargs)

    return call


_FOR_WRAPPERS: dict[str, Callable[..., Any]] = {
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "step": stepping_by(_steps_shards),
    "__reduce_ex__": _reduce_ex,
    "__getstate__": _getstate,
}
_METHODS = {name: _while_sharded(name, method) for name, method in {**_FOR_WRAPPERS, **_OTHERS}.items()}
METHODS: frozenset[str] = frozenset(_METHODS)
"""The methods that a sharded optimizer has on the instance."""


def shard_optimizer(optimizer: Optimizer, reducer: GradientReducer, gatherer: ParameterGatherer) -> OptimizerSharding:
    """Puts the methods on the optimizer; its buckets are added by the caller.

    Args:
        optimizer: An optimizer that :func:`decide_sharding` wants sharded.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.

    Returns:
        What the optimizer now knows of its sharding, without buckets.
    """
    sharding = OptimizerSharding(type(optimizer), reducer, gatherer)
    vars(optimizer)["_sharding"] = sharding
    _bind_methods(optimizer)
    return sharding


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
        mark_as_wrapped(sharding.methods["step"])
    # Not by `setattr`, which a class may have overridden.
    vars(optimizer).update(sharding.methods)
    sharding.guard = optimizer.register_step_pre_hook(refuse_step_of_class)


def _bound(name: str, optimizer: Optimizer) -> Callable[..., Any]:
    """Like ``types.MethodType``, but weakly: an optimizer that nobody holds is freed at once, and its state with it."""
    reference = weakref.ref(optimizer)

    @functools.wraps(getattr(type(optimizer), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise ReferenceError(f"The optimizer whose `{name}` was called is gone.")
        return _METHODS[name](alive, *args, **kwargs)

    # Schedulers wrap that of `step`.
    method.__func__ = _METHODS[name]  # type: ignore[attr-defined]
    return method


def _rebuild(cls: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """Ends the copying or unpickling of a sharded optimizer."""
    optimizer: Optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    optimizer.state = StateByShard(state["_sharding"].slots, state["state"])
    _bind_methods(optimizer)
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
