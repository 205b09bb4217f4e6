"""Optimizers that step other tensors than their groups show, such as this rank's shards. Object and class stay.

Users, schedulers and callbacks still see the optimizer's class, and the full parameters in ``param_groups``. The groups
hold this rank's shards only while the class's ``step`` runs, or gradients are unscaled or clipped. The methods that
differ are on the instance: Python finds them before the class's. ``optimizer._sharding``, the record of the sharding,
is also there.

A call through the class bypasses these methods: ``Adam.step(optimizer)``, or an ``optimizer.step`` kept from before the
training. Such a step raises an error. Other such calls cannot be detected.
"""

import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.liveness import met
from lightning_parstrat.distributed.comm.work import marked
from lightning_parstrat.distributed.engine.buckets import GradientBucket, ParameterBucket, ParameterSlot
from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer
from lightning_parstrat.distributed.engine.reducer import GradientReducer
from lightning_parstrat.distributed.engine.state import (
    ELEMENTWISE_OPTIMIZERS,
    Shards,
    StateByShard,
    StateLeftOut,
    gather_state_dict,
    grouped_parameters,
    own_state_dict,
    shard_existing_state,
)
from lightning_parstrat.distributed.torch_compat import mark_as_wrapped, note_step_called, without_step_hooks

SHARDING = "_sharding"
"""The attribute of an optimizer that has its :class:`OptimizerSharding`."""

_STEPS = "_steps_otherwise"
"""An attribute of an optimizer while its own step runs. Meanwhile its class may step."""


def stepping_by(steps: Callable[[Optimizer, Callable[[], Any] | None, dict[str, Any]], Any]) -> Callable[..., Any]:
    """A ``step`` for an optimizer's instance: Python finds it before the class's.

    Hooks of a step run once, around ``steps``, and see the groups as shown.

    Args:
        steps: Steps an optimizer. It gets the optimizer, its closure and further arguments.
    """

    @Optimizer.profile_hook_step
    def between_hooks(self: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        return steps(self, closure, arguments)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # For schedulers: this method may replace their wrapper of `step`.
        note_step_called(self)
        own = vars(self)
        is_nested = _STEPS in own
        own[_STEPS] = True
        try:
            return between_hooks(self, *args, **kwargs)
        finally:
            if not is_nested:
                own.pop(_STEPS, None)

    return step


def refuse_step_of_class(optimizer: Optimizer, *_: Any) -> None:
    """A hook before ``step`` of the optimizer's class, which cannot step shards.

    Raises:
        RuntimeError: The class's ``step`` was called by other code than the object's ``step``.
    """
    if _STEPS not in vars(optimizer):
        name = type(optimizer).__name__
        raise RuntimeError(
            f"`{name}.step` was called, not `step` of the object, which alone knows of the shards that it steps. Call"
            f" `optimizer.step()`, not `{name}.step(optimizer)`, nor an `optimizer.step` kept from before the training."
        )


def _needs_closure(cls: type[Optimizer]) -> bool:
    step = getattr(cls, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    return issubclass(cls, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)


# Called in every step. Reading a signature takes longer than some steps do.
needs_closure: Callable[[type[Optimizer]], bool] = cast(Any, functools.lru_cache(_needs_closure))
"""Whether ``step`` of an optimizer's class needs a closure, as LBFGS does. It evaluates the loss several times."""


@contextmanager
def showing(optimizer: Optimizer, stand_ins: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Within it, each of an optimizer's groups holds its part of ``stand_ins`` instead of its parameters."""
    parameters = [group["params"] for group in optimizer.param_groups]
    for group, tensors in zip(optimizer.param_groups, stand_ins, strict=True):
        group["params"] = list(tensors)
    try:
        yield
    finally:
        # `load_state_dict` replaces the dictionaries but keeps their order.
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = own


class ClosureEvaluatedAgainError(RuntimeError):
    """An optimizer called its closure a second time within one step."""


def evaluated_once(closure: Callable[[], Any], optimizer: str) -> Callable[[], Any]:
    """A closure that raises :class:`ClosureEvaluatedAgainError` if ``optimizer`` calls it a second time."""
    left = [closure]

    def evaluate() -> Any:
        if not left:
            raise ClosureEvaluatedAgainError(
                f"{optimizer} evaluates its closure more than once per step, which sharded optimizer state does not"
                " allow. With partition='auto' every rank steps an optimizer that does so, as under `ddp`."
            )
        return left.pop()()

    return evaluate


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a sharding. That remains after its training, until its state is unsharded."""
    return SHARDING in vars(optimizer)


def sharding_of(optimizer: Optimizer) -> "OptimizerSharding":
    """The sharding of a sharded optimizer, see :func:`is_sharded`."""
    return cast(OptimizerSharding, vars(optimizer)[SHARDING])


def has_master_weights(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps fp32 copies of parameters."""
    return is_sharded(optimizer) and any(bucket.master is not None for bucket in sharding_of(optimizer).buckets)


class OptimizerSharding:
    """The sharding of one optimizer: its buckets, the shard of each parameter, and the objects that move them.

    Args:
        optimizer: The optimizer.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.
        adopt: See :meth:`ShardedDataParallel.adopt_added_parameters`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        adopt: Callable[[], list[ParameterBucket]],
    ) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.gatherer = gatherer
        self.buckets: list[ParameterBucket] = []
        self.slots: dict[Tensor, ParameterSlot] = {}
        self.attached = True
        self.methods: dict[str, types.MethodType] = {}
        self.guard = optimizer.register_step_pre_hook(refuse_step_of_class)
        """The handle of the hook that refuses a step which bypasses the optimizer's own methods."""
        self.shard_groups = reducer.collectives.shard_groups
        self.adopt = adopt

    @property
    def shards(self) -> Shards:
        """Where the state is."""
        ranks = self.shard_groups.groups[0] if self.buckets else range(1)
        return Shards(self.slots, ranks, self.reducer.control)

    def look_up(self, buckets: Sequence[ParameterBucket]) -> None:
        """Finds the optimizer's parameters in buckets. Every rank steps all parameters that are in none."""
        slots = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        parameters = grouped_parameters(self.optimizer)
        self.slots.update({one: slots[one] for one in parameters if one in slots})
        own = {slot.bucket for slot in self.slots.values()}
        self.buckets = [bucket for bucket in buckets if bucket in own]

    def stepped(self) -> list[list[tuple[GradientBucket | None, Tensor]]]:
        """The tensors that this rank steps for each of the groups: shards with their buckets, others with None."""
        return [list(self._stepped_for(group["params"])) for group in self.optimizer.param_groups]

    def _stepped_for(self, parameters: Iterable[Tensor]) -> Iterator[tuple[GradientBucket | None, Tensor]]:
        for parameter in parameters:
            slot = self.slots.get(parameter)
            if slot is None:
                yield None, parameter
            elif slot.shard is not None:
                yield slot.bucket, slot.shard

    @property
    def exposes_gradients(self) -> bool:
        """Whether ``param.grad`` of the full parameters holds the mean gradients. torch's functions then apply."""
        return self.reducer.exposes_gradients

    def finish_gradients(self) -> None:
        """Waits until the shards' gradients are the mean over all ranks. Collective."""
        self.reducer.finish(self.buckets)

    def step(
        self, original_step: Callable[..., Any], closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> Any:
        """Steps the shards, all-gathers the parameters. Collective: one all-gather per bucket that may have moved.

        Args:
            original_step: ``step`` of the optimizer's class, bound to the optimizer.
            closure: Evaluated first, once, or None. The original gets its result.
            arguments: Further arguments of the original.

        Returns:
            The original's result.
        """
        loss = None
        if closure is not None:
            # Forward, backward, clipping and hooks are the user's: they see the full parameters.
            with torch.enable_grad():
                loss = closure()
            arguments["closure"] = evaluated_once(lambda: loss, type(self.optimizer).__name__)
        self._make_ready()
        results = []
        with without_step_hooks(self.optimizer):
            for buckets, stand_ins in self._parts():
                name = f"zero1_custom: step bucket {', '.join([str(bucket.index) for bucket in buckets])}"
                with marked(name), showing(self.optimizer, stand_ins):
                    results.append(original_step(**arguments))
                arguments.pop("closure", None)
                for bucket in buckets:
                    self.gatherer.launch(bucket)
        self.gatherer.finish_prompt()
        return results[0]

    def _make_ready(self) -> None:
        """Brings gradients and parameters to the shards."""
        added = self.adopt()
        if not isinstance(self.optimizer.state, StateByShard):
            # A program has replaced it, and will use parameters as keys.
            self.optimizer.state = shard_existing_state(self.optimizer.state, self.slots)
        self.gatherer.finish()
        if added:
            self.reducer.reduce_left_over(added)
        self.reducer.finish(self.buckets)
        for bucket in self.buckets:
            # The user's changes are stepped.
            bucket.take_over_changes()

    def _parts(self) -> list[tuple[list[ParameterBucket], list[list[Tensor]]]]:
        """The parts that are stepped one after the other: the first is in flight while the next steps.

        The next forward reads parameters in the reverse order of their gradients. An optimizer that may not step each
        element alone steps once. It may count its steps, or act once per step.

        Returns:
            Buckets, and their tensors in each of the optimizer's groups.
        """
        stepped = self.stepped()
        is_elementwise = type(self.optimizer) in ELEMENTWISE_OPTIMIZERS
        # Those that may have moved on any rank: the same on all ranks. A user may have set a gradient, and an unknown
        # optimizer may move parameters without one.
        all_move = self.exposes_gradients or not is_elementwise
        # The last gradients to be ready belong to the parameters that the next forward reads first.
        buckets = [bucket for bucket in reversed(self.buckets) if all_move or bucket.has_gradients]
        if not is_elementwise or len(buckets) < 2:
            return [(buckets, [[tensor for _, tensor in group] for group in stepped])]
        parts = [
            (together, [[tensor for bucket, tensor in group if bucket in together] for group in stepped])
            for together in _worth_a_call(buckets)
        ]
        others = [[tensor for bucket, tensor in group if bucket is None] for group in stepped]
        return [*parts, ([], others)] if any(others) else parts


_SMALLEST_STEP = 2**20
"""Bytes of shards that are worth a call of an optimizer. Shards shrink with the number of ranks, a call does not."""

_CALLS_ON_GPU = 8
"""The most calls of a step on a GPU. A call takes the host as long as a GPU steps a hundred megabytes."""


def _worth_a_call(buckets: Sequence[ParameterBucket]) -> list[list[ParameterBucket]]:
    """Neighbours that one call steps. So the number of calls follows the bytes that a rank steps."""
    sizes = [bucket.layout.numel * bucket.layout.itemsize // bucket.layout.world_size for bucket in buckets]
    on_gpu = any(bucket.device.type != "cpu" for bucket in buckets)
    smallest = max(_SMALLEST_STEP, -(-sum(sizes) // _CALLS_ON_GPU) if on_gpu else 0)
    together: list[list[ParameterBucket]] = []
    room = 0
    for bucket, size in zip(buckets, sizes, strict=True):
        if room > 0:
            together[-1].append(bucket)
        else:
            together.append([bucket])
            room = smallest
        room -= size
    return together


def _of_class(optimizer: Optimizer, name: str) -> Any:
    """The attribute of ``optimizer`` without its instance's methods. A test's mock is found, too: it is not bound."""
    found = next(vars(base)[name] for base in type(optimizer).__mro__ if name in vars(base))
    return found.__get__(optimizer) if hasattr(found, "__get__") else found


def _steps_shards(self: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
    """Steps this rank's shards by the class's ``step``, and gathers the parameters. Collective.

    The closure (forward, backward and clipping) is evaluated first, on the full parameters.
    """
    sharding = sharding_of(self)
    original = _of_class(self, "step")
    if sharding.attached:
        return sharding.step(original, closure, arguments)
    # The training has ended: the optimizer continues as an ordinary one.
    unsharded = unshard(self)
    self.load_state_dict(unsharded)  # type: ignore[arg-type]
    with without_step_hooks(self):
        return original(**arguments) if closure is None else original(closure=closure, **arguments)


def _zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Zeroes the full parameters' gradients and the shards' reduced ones. It takes the class's arguments."""
    _of_class(self, "zero_grad")(*args, **kwargs)
    sharding = sharding_of(self)
    if sharding.attached:
        set_to_none = bool(kwargs.get("set_to_none", args[0] if args else True))
        sharding.reducer.zero(set(sharding.slots.values()), set_to_none)


def _state_dict(self: Optimizer) -> dict[str, Any]:
    """The unsharded state on every rank, in torch's own format and on the host.

    Collective: nothing is sent before all ranks have called it. A rank that waits for others logs that.
    """
    sharding = sharding_of(self)
    shards, buckets = sharding.shards, ", ".join(str(bucket.index) for bucket in sharding.buckets[:1])
    advice = "Call it on all ranks, and save what it returns on rank 0."
    with met("`optimizer.state_dict()`", shards.control.group, advice, of=f"buckets from {buckets}"):
        return gather_state_dict(self, shards, on_all=True)


def _load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads unsharded state in torch's format, of which this rank keeps its shards.

    Not collective, except for parameters that joined the groups since the last step: they get buckets first.
    """
    sharding = sharding_of(self)
    if sharding.attached:
        sharding.adopt()
    own = own_state_dict(self, sharding.slots, state_dict)
    with showing(self, [[tensor for _, tensor in group] for group in sharding.stepped()]):
        _of_class(self, "load_state_dict")(own)
    self.state = StateByShard(sharding.slots, self.state)


def _reduce_ex(self: Optimizer, protocol: Any) -> Any:
    """Makes copies and pickles ordinary optimizers without state: this rank has only a part of it."""
    return _make_copy, (type(self), self.defaults, self.param_groups)


METHODS: dict[str, Callable[..., Any]] = {
    "zero_grad": _zero_grad,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "step": stepping_by(_steps_shards),
    "__reduce_ex__": _reduce_ex,
}
"""The methods that a sharded optimizer has on the instance."""


def lend_methods(optimizer: Optimizer, wrapper: Any) -> None:
    """Makes a wrapper that inherits the optimizer's class use the sharded optimizer's methods, except ``step``."""
    if is_sharded(optimizer):
        methods = sharding_of(optimizer).methods
        vars(wrapper).update({name: methods[name] for name in METHODS.keys() - {"step", "__reduce_ex__"}})


def shard_optimizer(sharding: OptimizerSharding) -> None:
    """Puts the methods on an optimizer that :func:`decide_sharding` wants sharded. Its buckets are found later."""
    sharding.methods = {name: _bound(name, sharding.optimizer) for name in METHODS}
    # Schedulers take it for their wrapper, which it may replace: an optimizer with a user's `step` is not sharded.
    mark_as_wrapped(sharding.methods["step"].__func__)
    # Not by `setattr`, which a class may have overridden.
    vars(sharding.optimizer).update({**sharding.methods, SHARDING: sharding})


def _bound(name: str, optimizer: Optimizer) -> types.MethodType:
    """A method with the class's signature. After the sharding has ended, it calls the class's method."""

    # A program may compile its own function around a step. No message can be compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(getattr(type(optimizer), name))
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return METHODS[name](self, *args, **kwargs) if is_sharded(self) else _of_class(self, name)(*args, **kwargs)

    return types.MethodType(method, optimizer)


def _refuse_without_state(optimizer: Optimizer, *_: Any) -> None:
    """A hook before the step of a copy. A copy of an optimizer without state would otherwise step silently."""
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
        The optimizer's unsharded state, in host memory, to be loaded. If the optimizer was not sharded, None.
    """
    if not is_sharded(optimizer):
        return None
    state_dict = optimizer.state_dict()
    forget_sharding(optimizer)
    return state_dict


def forget_sharding(optimizer: Optimizer) -> None:
    """Makes a sharded optimizer an ordinary one without state. Not collective."""
    if not is_sharded(optimizer):
        return
    optimizer.state = defaultdict(dict)
    own, sharding = vars(optimizer), sharding_of(optimizer)
    for name, method in sharding.methods.items():
        # A scheduler or the user may have wrapped the method since.
        if own.get(name) is method:
            del own[name]
    sharding.guard.remove()
    del own[SHARDING]
