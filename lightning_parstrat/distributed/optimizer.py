"""torch optimizers, stepping on this rank's shard: the same object, its class swapped for a subclass.

As torch's FSDP2 does with modules, ``AdamW`` becomes ``ShardedAdamW(ShardedOptimizer, AdamW)``. Users, schedulers and
callbacks go on seeing the full parameters in ``param_groups``; only while the original ``step`` runs (or gradients are
unscaled or clipped) do the groups hold this rank's shards instead.

The mixin has no attributes of its own but methods, because wrappers such as Lightning's inherit the optimizer's class
and ask the instance they wrap for everything else; what it knows is in one object, ``optimizer._sharding``.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.layout import Partition
from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.distributed.buckets import ParameterBucket, ParameterSlot
from lightning_parstrat.distributed.gatherer import ParameterGatherer
from lightning_parstrat.distributed.reducer import GradientReducer

ELEMENTWISE_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""torch's optimizers whose update of an element looks at that element alone. Exact classes: a subclass may differ."""


def choose_partition(optimizer: Optimizer, choice: PartitionChoice) -> Partition:
    """The partition for ``optimizer``; ``"auto"`` cuts parameters only for optimizers known to be element-wise."""
    if choice != "auto":
        return choice
    return "element" if original_class(optimizer) in ELEMENTWISE_OPTIMIZERS else "parameter"


def check_supported(optimizer: Optimizer) -> None:
    """Refuses optimizers that cannot step on shards.

    Raises:
        ValueError: The optimizer evaluates its closure again, wants sparse gradients, or has had its ``step`` replaced.
    """
    cls = original_class(optimizer)
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{name} evaluates its closure more than once per step, which sharded optimizer state does not allow."
            " Choose an optimizer whose `step()` works without a closure, or `strategy='ddp'`."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} works on sparse gradients, and only dense ones can be sharded. Use Adam with"
            " `nn.Embedding(..., sparse=False)`, or `strategy='ddp'`."
        )
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"`step` of this {name} was replaced on the instance by {optimizer.step!r}, which would bypass the"
            " sharding. Derive a class that overrides `step` instead."
        )


def state_bytes_per_parameter_byte(optimizer: Optimizer) -> float | None:
    """How much state an element-wise optimizer keeps, found by letting one like it step a small parameter.

    Returns:
        Bytes of state per byte of parameters (AdamW: 2), averaged over groups; None where it cannot be told.
    """
    cls = original_class(optimizer)
    if cls not in ELEMENTWISE_OPTIMIZERS:
        return None
    known = inspect.signature(cls).parameters
    state_bytes = parameter_bytes = 0
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(1024))
        probe.grad = torch.zeros_like(probe)
        options = {key: value for key, value in group.items() if key in known and key != "params"}
        try:
            twin = cls([probe], **{**options, "capturable": False} if "capturable" in known else options)
            # Not `twin.step()`: hooks that a user has registered for all optimizers are not meant for this one.
            getattr(cls.step, "__wrapped__", cls.step)(twin)
        except Exception:
            # Settings that only work on the user's device, such as a learning rate in a CUDA tensor.
            return None
        entries = [entry for entry in twin.state[probe].values() if isinstance(entry, Tensor)]
        size = sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
        parameter_bytes += size
        state_bytes += size * sum(entry.nbytes for entry in entries if entry.shape == probe.shape) // probe.nbytes
    return state_bytes / parameter_bytes if parameter_bytes else 0.0


class OptimizerSharding:
    """What a sharded optimizer knows: its buckets, which shard stands for which parameter, and who moves them.

    Args:
        original: The optimizer's class before the swap.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.
    """

    def __init__(self, original: type[Optimizer], reducer: GradientReducer, gatherer: ParameterGatherer) -> None:
        self.original = original
        self.reducer = reducer
        self.gatherer = gatherer
        self.buckets: list[ParameterBucket] = []
        self.slots: dict[Tensor, ParameterSlot] = {}
        self.attached = True
        self.adopt_added_parameters: Callable[[], None] = _nothing_to_adopt

    def add_buckets(self, buckets: Sequence[ParameterBucket]) -> None:
        """Takes charge of further buckets of this optimizer's parameters."""
        self.buckets += buckets
        self.slots.update({slot.parameter: slot for bucket in buckets for slot in bucket.slots})

    def has_added_parameters(self, optimizer: Optimizer) -> bool:
        """Whether a group holds a parameter that is in no bucket, however it came there. The same on all ranks."""
        return any(parameter not in self.slots for group in optimizer.param_groups for parameter in group["params"])

    def shards(self) -> list[nn.Parameter]:
        """Every shard this rank owns, in the order of the buckets."""
        slots = (slot for bucket in self.buckets for slot in bucket.slots)
        return [slot.shard for slot in slots if slot.shard is not None]

    @contextmanager
    def shard_groups(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it ``param_groups`` hold this rank's shards instead of the full parameters."""
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        for group, parameters in groups:
            slots = (self.slots[parameter] for parameter in parameters)
            group["params"] = [slot.shard for slot in slots if slot.shard is not None]
        try:
            yield
        finally:
            # `load_state_dict` replaces the dictionaries; their order stays.
            for group, (_, parameters) in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    @property
    def exposes_gradients(self) -> bool:
        """Whether ``param.grad`` of the full parameters holds the mean gradients, so that torch's functions apply."""
        return self.reducer.exposes_gradients

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.buckets[0].flat.device if self.buckets else torch.device("cpu")

    def maximum_over_ranks(self, value: Tensor) -> Tensor:
        """The largest of all ranks' values of a 0-d tensor, in place. Collective; nothing waits on the host."""
        self.reducer.collectives.all_reduce(value, op=dist.ReduceOp.MAX).wait()
        return value

    def finish_gradients(self) -> None:
        """Waits until the shards' gradients are the mean over all ranks. Collective."""
        self.reducer.finish(self.buckets)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Steps the shards, brings the parameters home. Collective: one all-gather per bucket that may have moved."""
        if not self.attached:
            raise RuntimeError(
                f"This {type(optimizer).__name__} was sharded by a training that has ended; its parameters are no"
                " longer gathered. Start another `fit`, or build a new optimizer."
            )
        if self.has_added_parameters(optimizer):
            known = len(self.buckets)
            self.adopt_added_parameters()
            self.reducer.reduce_left_over(self.buckets[known:])
        self.finish_gradients()
        for bucket in self.buckets:
            bucket.move_in()
        unsharded_step = self.original.step
        if getattr(unsharded_step, "hooked", False):
            # The users' step hooks belong to the full groups; `ShardedOptimizer.step` runs them.
            unsharded_step = unsharded_step.__wrapped__  # type: ignore[attr-defined]
        with self.shard_groups(optimizer):
            unsharded_step(optimizer, **kwargs)
        self.gatherer.gather(self._stepped_buckets())

    def _stepped_buckets(self) -> list[ParameterBucket]:
        """Buckets whose parameters may have moved on any rank; all ranks come to the same answer."""
        if self.exposes_gradients or self.original not in ELEMENTWISE_OPTIMIZERS:
            # A user may have set a gradient, and an unknown optimizer may move parameters without one.
            return self.buckets
        return [bucket for bucket in self.buckets if bucket.has_gradients]


def _step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Runs ``closure`` (forward, backward, clipping), then steps this rank's shards and gathers the parameters.

    Collective. Further arguments go to the original ``step``.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._sharding.step(self, **kwargs)
    return loss


class ShardedOptimizer(Optimizer):
    """The methods that differ once an optimizer's state is sharded. Never instantiated: see :func:`shard_optimizer`."""

    _sharding: OptimizerSharding

    step = Optimizer.profile_hook_step(_step)  # type: ignore[assignment]
    # torch wraps every class's step once; this one is wrapped, and must not be again after unpickling.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the full parameters' gradients and the reduced ones of the shards."""
        super().zero_grad(set_to_none)
        if self._sharding.attached:
            self._sharding.reducer.zero(self._sharding.buckets, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group and buckets its parameters. Collective: all ranks add the same group."""
        super().add_param_group(param_group)
        if self._sharding.attached:
            self._sharding.adopt_added_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The whole state on every rank, in torch's own format and on the host. Collective."""
        from lightning_parstrat.distributed.state_dict import gather_state_dict

        return gather_state_dict(self, destination=None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads whole state in torch's own format, of which this rank keeps its shards. Not collective."""
        from lightning_parstrat.distributed.state_dict import load_sharded

        load_sharded(self, state_dict, super().load_state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds a part of the optimizer's state and cannot be copied or pickled. Use its"
            " `state_dict()` (on all ranks together), or copy the optimizer before `fit`."
        )


def _nothing_to_adopt() -> None:
    """Stands in until the engine has set its own way of bucketing parameters that are added later."""


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class as its user knows it."""
    sharding = vars(optimizer).get("_sharding")
    return sharding.original if sharding is not None else type(optimizer)


def shard_optimizer(optimizer: Optimizer, reducer: GradientReducer, gatherer: ParameterGatherer) -> OptimizerSharding:
    """Swaps the optimizer's class; its buckets are added by the caller.

    Args:
        optimizer: An optimizer that :func:`check_supported` let pass.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.

    Returns:
        What the optimizer now knows of its sharding, without buckets.
    """
    cls = type(optimizer)
    sharding = OptimizerSharding(cls, reducer, gatherer)
    optimizer.__class__ = type(f"Sharded{cls.__name__}", (ShardedOptimizer, cls), {"__module__": cls.__module__})
    optimizer._sharding = sharding  # type: ignore[attr-defined]
    _renew_scheduler_wrapper(optimizer)
    return sharding


def unshard_optimizer(optimizer: Optimizer) -> None:
    """Restores the optimizer's class; its state must have been made whole, or emptied, before."""
    optimizer.__class__ = original_class(optimizer)
    del optimizer._sharding  # type: ignore[attr-defined]
    _renew_scheduler_wrapper(optimizer)


def shard_existing_state(optimizer: Optimizer, sharding: OptimizerSharding) -> None:
    """Replaces whole state that the optimizer holds already (Adagrad makes it at once) by this rank's shards."""
    for parameter in [key for key in optimizer.state if key in sharding.slots]:
        state = optimizer.state.pop(parameter)
        slot = sharding.slots[parameter]
        if slot.shard is not None:
            optimizer.state[slot.shard] = {key: shard_value(value, slot) for key, value in state.items()}


def shard_value(value: Any, slot: ParameterSlot) -> Any:
    """This rank's part of one entry of a parameter's state; what has not the parameter's shape is kept whole."""
    if not isinstance(value, Tensor) or slot.shard is None or value.shape != slot.parameter.shape:
        return value
    return slot.part_of(value).clone()


def _renew_scheduler_wrapper(optimizer: Optimizer) -> None:
    """Makes a learning rate scheduler's wrapper of ``step``, an instance attribute, call the new class's."""
    stale = vars(optimizer).pop("step", None)
    if stale is None:
        return
    reference = weakref.ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise AssertionError("the optimizer of this step is gone")
        alive._opt_called = True  # type: ignore[attr-defined]
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
