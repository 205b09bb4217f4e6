"""torch optimizers, stepping on this rank's shard: the same object, its class swapped for a subclass.

As torch's FSDP2 does with modules, ``AdamW`` becomes a class ``AdamW(ShardedOptimizer, AdamW)``. Users, schedulers and
callbacks go on seeing the full parameters in ``param_groups``; only while the original ``step`` runs (or gradients are
unscaled or clipped) do the groups hold this rank's shards instead.

The mixin has no attributes of its own but methods, because wrappers such as Lightning's inherit the optimizer's class
and ask the instance they wrap for everything else; what it knows is in one object, ``optimizer._sharding``.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, note_step_called, without_step_hooks
from lightning_parstrat.distributed.zero1.gatherer import ParameterGatherer
from lightning_parstrat.distributed.zero1.optimizer_sharding import OptimizerSharding, original_class
from lightning_parstrat.distributed.zero1.reducer import GradientReducer
from lightning_parstrat.distributed.zero1.state_dict import StateByShard, gather_state_dict, load_sharded


def _step(self: Any, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
    """Steps this rank's shards by the original ``step``, and gathers the parameters. Collective.

    Args:
        self: The optimizer.
        closure: Forward, backward and clipping; evaluated when the original asks for it, on the full parameters.
        **arguments: Further arguments of the original.

    Returns:
        What the original returns.
    """
    if not self._sharding.attached:
        # Its training has ended, or it is a copy: it goes on as an ordinary optimizer, of its own class.
        unsharded = unshard(self)
        self.load_state_dict(unsharded)
        original = functools.partial(type(self).step, self)
        with without_step_hooks(self):
            return original(**arguments) if closure is None else original(closure=closure, **arguments)
    return self._sharding.step(self, super(ShardedOptimizer, self).step, closure, arguments)


class ShardedOptimizer(Optimizer):
    """The methods that differ once an optimizer's state is sharded. Never instantiated: see :func:`shard_optimizer`."""

    _sharding: OptimizerSharding

    step = Optimizer.profile_hook_step(_step)  # type: ignore[assignment]
    # torch wraps every class's step once; this one is wrapped, and must not be again after unpickling.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zeroes the full parameters' gradients and the reduced ones of the shards. Arguments are the original's."""
        super().zero_grad(*args, **kwargs)
        if self._sharding.attached:
            set_to_none = bool(kwargs.get("set_to_none", args[0] if args else True))
            self._sharding.reducer.zero(set(self._sharding.slots.values()), set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group and buckets its parameters. Collective: all ranks add the same group."""
        super().add_param_group(param_group)
        if self._sharding.attached:
            self._sharding.adopt_added_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The unsharded state on every rank, in torch's own format and on the host. Collective."""
        return gather_state_dict(self, destination=None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads unsharded state in torch's format, of which this rank keeps its shards; see :func:`load_sharded`."""
        load_sharded(self, state_dict, super().load_state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold this rank's part of the state; used on all ranks together, they become unsharded."""
        kept = ("defaults", "state", "param_groups", "_sharding")
        attributes = {key: vars(self)[key] for key in kept}
        return _rebuild, (self._sharding.original, {**attributes, "state": dict(self.state)})


def shard_optimizer(optimizer: Optimizer, reducer: GradientReducer, gatherer: ParameterGatherer) -> OptimizerSharding:
    """Swaps the optimizer's class; its buckets are added by the caller.

    Args:
        optimizer: An optimizer that :func:`decide_sharding` wants sharded.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.

    Returns:
        What the optimizer now knows of its sharding, without buckets.
    """
    cls = type(optimizer)
    sharding = OptimizerSharding(cls, reducer, gatherer)
    # The same object: schedulers, callbacks and loggers hold it already.
    optimizer.__class__ = _sharded_class(cls)
    optimizer._sharding = sharding  # type: ignore[attr-defined]
    _renew_scheduler_wrapper(optimizer)
    return sharding


class _ShardedFirst(type):
    """Makes of ``(original, ShardedOptimizer)`` a class with the object layout of the first, methods of the second.

    Only an object whose layout stays the same can change its class, and a class has that of its first base; layouts
    differ where the original has bases beside ``Optimizer``, such as ``abc.ABC``.
    """

    def mro(cls) -> list[type]:
        if cls.__bases__[1:] == (ShardedOptimizer,):
            return [cls, ShardedOptimizer, *cls.__bases__[0].__mro__]
        return super().mro()


def _sharded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """One for each class, and of the same name: a monitor of learning rates files optimizers by both."""
    existing = [subclass for subclass in cls.__subclasses__() if ShardedOptimizer in subclass.__bases__]
    if existing:
        return existing[0]
    # Whoever asks `type(optimizer).__name__`, or pickles by module and name, finds the original.
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    metaclass = _ShardedFirst if type(cls) is type else type("_ShardedFirst", (_ShardedFirst, type(cls)), {})
    sharded: type[Optimizer] = metaclass(cls.__name__, (cls, ShardedOptimizer), namespace)
    return sharded


def _rebuild(original: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """Ends the copying or unpickling of a sharded optimizer."""
    cls = _sharded_class(original)
    optimizer: Optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    optimizer.state = StateByShard(state["_sharding"].slots, state["state"])
    return optimizer


def _restore_class(optimizer: Optimizer) -> None:
    """Restores the optimizer's class; its state must have been gathered, or emptied, before."""
    optimizer.__class__ = original_class(optimizer)
    del optimizer._sharding  # type: ignore[attr-defined]
    _renew_scheduler_wrapper(optimizer)


def unshard(optimizer: Optimizer) -> dict[str, Any] | None:
    """Undoes the sharding of an earlier training, if there was one, and leaves the state empty. Collective.

    Returns:
        The optimizer's unsharded state, in host memory, to be loaded; or None where it had not been sharded.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return None
    state_dict = optimizer.state_dict()
    optimizer.state = defaultdict(dict)
    _restore_class(optimizer)
    return state_dict


def _renew_scheduler_wrapper(optimizer: Optimizer) -> None:
    """Makes a learning rate scheduler's wrapper of ``step``, an instance attribute, call the new class's."""
    stale = vars(optimizer).pop("step", None)
    if stale is None:
        return
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise AssertionError("the optimizer of this step is gone")
        note_step_called(alive)
        return type(alive).step(alive, *args, **kwargs)

    mark_as_wrapped(step)
    optimizer.step = step  # type: ignore[method-assign]
