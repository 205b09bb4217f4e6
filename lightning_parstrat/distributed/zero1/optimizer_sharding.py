"""What is known of an optimizer's sharding: its buckets, its shards, and how to step them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.torch_compat import without_step_hooks
from lightning_parstrat.distributed.zero1.gatherer import ParameterGatherer
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ParameterSlot
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket
from lightning_parstrat.distributed.zero1.reducer import GradientReducer
from lightning_parstrat.distributed.zero1.stepping import OneEvaluation, ShownGroups

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


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether the optimizer knows of a sharding; it stays so after its training, until its state is unsharded."""
    return "_sharding" in vars(optimizer)


def sharding_of(optimizer: Optimizer) -> "OptimizerSharding":
    """What a sharded optimizer knows of its sharding; see :func:`is_sharded`."""
    sharding: OptimizerSharding = vars(optimizer)["_sharding"]
    return sharding


class OptimizerSharding:
    """What a sharded optimizer knows: its buckets, which shard stands for which parameter, and who moves them.

    Args:
        optimizer_class: The optimizer's class.
        reducer: Brings mean gradients to the shards.
        gatherer: Brings updated parameters back.
        adopt_added_parameters: Makes buckets of parameters that were added to a group. Collective.
    """

    guard: RemovableHandle
    """Of the hook that refuses a step around the optimizer's own methods."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        adopt_added_parameters: Callable[[], None],
    ) -> None:
        self.optimizer_class = optimizer_class
        self.reducer = reducer
        self.gatherer = gatherer
        self.adopt_added_parameters = adopt_added_parameters
        self.buckets: list[ParameterBucket] = []
        self.slots: dict[Tensor, ParameterSlot] = {}
        self.replicated: set[Tensor] = set()
        self.attached = True
        self.methods: dict[str, MethodType] = {}
        self.wrapped_step: Callable[..., Any] | None = None
        self.shard_groups = reducer.collectives.shard_groups
        self._known_groups: _KnownGroups | None = None

    @property
    def control(self) -> Collectives:
        """Of all ranks that hold a part of the state; works on host memory."""
        return self.reducer.control

    @property
    def ranks_of_a_copy(self) -> Sequence[int]:
        """The ranks of :attr:`control` that together hold one copy of the state, in the order of their shards."""
        return self.shard_groups.groups[0] if self.buckets else range(1)

    def look_up(self, optimizer: Optimizer, buckets: Sequence[ParameterBucket]) -> None:
        """Finds the optimizer's parameters in buckets; every rank steps all of those that are in none."""
        slots = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter in slots:
                self.slots[parameter] = slots[parameter]
            else:
                self.replicated.add(parameter)
        own = {slot.bucket for slot in self.slots.values()}
        self.buckets = [bucket for bucket in buckets if bucket in own]
        self._known_groups = None

    def has_added_parameters(self, optimizer: Optimizer) -> bool:
        """Whether a group holds a parameter not seen before, however it came there. The same on all ranks."""
        return self._groups(optimizer).have_added

    def _groups(self, optimizer: Optimizer) -> "_KnownGroups":
        """What stands in for the parameters in the groups, looked up again only where groups or slots have changed."""
        now = [group["params"] for group in optimizer.param_groups]
        known = self._known_groups
        # Not `==`, which compares tensors by their elements. A list may have been edited in place.
        if known is None or not _same(now, known.parameters):
            stepped = [list(self._stepped(parameters)) for parameters in now]
            by_bucket: list[dict[GradientBucket | None, list[Tensor]]] = [{} for _ in now]
            for of_group, found in zip(stepped, by_bucket, strict=True):
                for bucket, tensor in of_group:
                    found.setdefault(bucket, []).append(tensor)
            known = self._known_groups = _KnownGroups(
                parameters=[list(parameters) for parameters in now],
                stand_ins=[[tensor for _, tensor in of_group] for of_group in stepped],
                by_bucket=by_bucket,
                have_added=any(p not in self.slots and p not in self.replicated for group in now for p in group),
            )
        return known

    def _stepped(self, parameters: Iterable[Tensor]) -> "Iterator[tuple[GradientBucket | None, Tensor]]":
        """What this rank steps for ``parameters``: shards with their buckets, and what every rank steps with None."""
        for parameter in parameters:
            slot = self.slots.get(parameter)
            if slot is None:
                yield None, parameter
            elif slot.shard is not None:
                yield slot.bucket, slot.shard

    @contextmanager
    def showing_shards(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it ``param_groups`` hold what this rank steps instead of the full parameters."""
        shown = ShownGroups(optimizer)
        shown.show(self._groups(optimizer).stand_ins)
        try:
            yield
        finally:
            shown.restore()

    @property
    def exposes_gradients(self) -> bool:
        """Whether ``param.grad`` of the full parameters holds the mean gradients, so that torch's functions apply."""
        return self.reducer.exposes_gradients

    def finish_gradients(self) -> None:
        """Waits until the shards' gradients are the mean over all ranks. Collective."""
        self.reducer.finish(self.buckets)

    def step(
        self,
        optimizer: Optimizer,
        original_step: Callable[..., Any],
        closure: Callable[[], Any] | None,
        arguments: dict[str, Any],
    ) -> Any:
        """Steps the shards, all-gathers the parameters. Collective: one all-gather per bucket that may have moved.

        Args:
            optimizer: The optimizer that this is of.
            original_step: ``step`` of its class, bound to it.
            closure: Evaluated while ``param_groups`` hold the full parameters, or None.
            arguments: Further arguments of the original.

        Returns:
            What the original returns.
        """
        parts: list[_Part] = []
        groups = ShownGroups(optimizer)

        def evaluate() -> Any:
            # The closure's forward, backward, clipping and hooks are the user's: they see the full parameters.
            groups.restore()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            parts.extend(self._parts(self._make_ready(optimizer)))
            groups.show(parts[0].stand_ins, parts[0].name)
            return loss

        with without_step_hooks(optimizer):
            try:
                if closure is None:
                    evaluate()
                    result = original_step(**arguments)
                else:
                    groups.show(self._groups(optimizer).stand_ins)
                    once = OneEvaluation(evaluate, self.optimizer_class.__name__)
                    result = original_step(**arguments, closure=once)
                    if not parts:
                        # It has stepped without asking for gradients.
                        parts.append(_Part(self._stepped_buckets(), []))
                groups.restore()
                self._send(parts[0])
                for part in parts[1:]:
                    groups.show(part.stand_ins, part.name)
                    original_step(**arguments)
                    groups.restore()
                    self._send(part)
            finally:
                groups.restore()
        self.gatherer.finish_prompt()
        return result

    def _parts(self, known: "_KnownGroups") -> list["_Part"]:
        """What is stepped one after the other, so that the first is in flight while the next steps.

        The next forward reads parameters in the reverse order of their gradients. An optimizer that is not known to
        step each element alone steps once: it may count its steps, or do something once per step.
        """
        # The last gradients to be ready belong to the parameters that the next forward reads first.
        buckets = self._stepped_buckets()[::-1]
        if self.optimizer_class not in ELEMENTWISE_OPTIMIZERS or len(buckets) < 2:
            return [_Part(buckets, known.stand_ins)]
        stepped: list[tuple[list[ParameterBucket], list[GradientBucket | None]]] = [
            (together, [*together]) for together in _worth_a_call(buckets)
        ]
        if any(None in by_bucket for by_bucket in known.by_bucket):
            stepped.append(([], [None]))
        return [
            _Part(sent, [[one for key in keys for one in by_bucket.get(key, [])] for by_bucket in known.by_bucket])
            for sent, keys in stepped
        ]

    def _send(self, part: "_Part") -> None:
        for bucket in part.buckets:
            bucket.publish_master_weights()
            self.gatherer.launch(bucket)

    def _make_ready(self, optimizer: Optimizer) -> "_KnownGroups":
        """Brings gradients and parameters to the shards; returns what is to be stepped."""
        self.gatherer.finish()
        known = self._groups(optimizer)
        if known.have_added:
            before = len(self.buckets)
            self.adopt_added_parameters()
            self.reducer.reduce_left_over(self.buckets[before:])
            known = self._groups(optimizer)
        self.finish_gradients()
        for bucket in self.buckets:
            # What the user has written into parameters since the last step (clamped, swapped, loaded) is what steps.
            bucket.copy_in_rebound()
            bucket.refresh_master_weights()
        return known

    def _stepped_buckets(self) -> list[ParameterBucket]:
        """Buckets whose parameters may have moved on any rank; all ranks come to the same answer."""
        if self.exposes_gradients or self.optimizer_class not in ELEMENTWISE_OPTIMIZERS:
            # A user may have set a gradient, and an unknown optimizer may move parameters without one.
            return self.buckets
        return [bucket for bucket in self.buckets if bucket.has_gradients]


_SMALLEST_STEP = 2**20
"""Bytes of shards that are worth a call of an optimizer: shards shrink with the number of ranks, a call does not."""

_CALLS_ON_GPU = 8
"""A call takes the host as long as a GPU steps a hundred megabytes."""


def _worth_a_call(buckets: Sequence[ParameterBucket]) -> list[list[ParameterBucket]]:
    """Neighbours that are stepped by one call, so that the number of calls goes by the bytes that a rank steps."""
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


class _Part(NamedTuple):
    """Buckets that are stepped by one call, and what each of the optimizer's groups holds of them."""

    buckets: list[ParameterBucket]
    stand_ins: list[list[Tensor]]

    @property
    def name(self) -> str:
        """For a trace."""
        return f"zero1_custom: step bucket {', '.join([str(bucket.index) for bucket in self.buckets])}"


class _KnownGroups(NamedTuple):
    """What was found out about the parameters that an optimizer's groups held when they were last looked at.

    Attributes:
        parameters: Of each group.
        stand_ins: What this rank steps for them, of each group.
        by_bucket: The same by bucket, of each group.
        have_added: Whether any of the parameters has no place yet.
    """

    parameters: list[list[Tensor]]
    stand_ins: list[list[Tensor]]
    by_bucket: list[dict[GradientBucket | None, list[Tensor]]]
    have_added: bool


def _same(groups: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    """Whether both hold the same objects in the same order."""
    if list(map(len, groups)) != list(map(len, others)):
        return False
    return all(map(is_, chain.from_iterable(groups), chain.from_iterable(others)))
