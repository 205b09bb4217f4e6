"""What is known of an optimizer's sharding: its buckets, its shards, and how to step them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class as its user knows it."""
    sharding = vars(optimizer).get("_sharding")
    return sharding.original if sharding is not None else type(optimizer)


def _nothing_to_adopt() -> None:
    """Stands in until the engine has set its own way of bucketing parameters that are added later."""


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
