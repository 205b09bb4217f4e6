"""What is known of an optimizer's sharding: its buckets, its shards, and how to step them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups, world_size
from lightning_parstrat.distributed.profiling import marked
from lightning_parstrat.distributed.torch_compat import without_step_hooks
from lightning_parstrat.distributed.zero1.gatherer import ParameterGatherer
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ParameterSlot
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket
from lightning_parstrat.distributed.zero1.reducer import GradientReducer

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


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class as its user knows it."""
    return sharding_of(optimizer).original if is_sharded(optimizer) else type(optimizer)


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
        self.replicated: set[Tensor] = set()
        self.attached = True
        self.adopt_added_parameters: Callable[[], None] = _nothing_to_adopt
        self._control: Collectives | None = reducer.control

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is known of this rank's part, without anything that can step it."""
        left_out = ("reducer", "gatherer")
        kept = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**kept, "attached": False, "adopt_added_parameters": _nothing_to_adopt, "_control": None}

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The group of all ranks that hold a part of the state; works on host memory.

        Raises:
            RuntimeError: This is a copy, and as many ranks as hold its parts are not there.
        """
        if self._control is not None:
            return self._control.group
        needed = self.buckets[0].layout.world_size if self.buckets else 1
        present = world_size() if dist.is_initialized() else 0
        if present != needed:
            raise RuntimeError(
                f"This copy of a sharded {self.original.__name__} holds one of {needed} parts of its state, and"
                f" {present} ranks are there. Save `optimizer.state_dict()`, called on all ranks, instead."
            )
        return process_groups().control

    def add_buckets(self, buckets: Sequence[ParameterBucket]) -> None:
        """Takes charge of further buckets of this optimizer's parameters."""
        self.buckets += buckets
        self.slots.update({slot.parameter: slot for bucket in buckets for slot in bucket.slots})

    def add_slot(self, slot: ParameterSlot, bucket: ParameterBucket) -> None:
        """Takes charge of one parameter of a bucket that is another optimizer's."""
        self.slots[slot.parameter] = slot
        if bucket not in self.buckets:
            self.buckets.append(bucket)

    def exchange_slots(self, slots: Mapping[Tensor, ParameterSlot]) -> None:
        """Takes charge of other places for the parameters that it has."""
        self.slots.update(slots)
        buckets = {slot.bucket for slot in slots.values() if isinstance(slot.bucket, ParameterBucket)}
        self.buckets = sorted(buckets, key=lambda bucket: bucket.index)

    def has_added_parameters(self, optimizer: Optimizer) -> bool:
        """Whether a group holds a parameter not seen before, however it came there. The same on all ranks."""
        return any(
            parameter not in self.slots and parameter not in self.replicated
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def stand_ins(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """What this rank steps for ``parameters``: its shards of them, and those that every rank steps replicated."""
        found = []
        for parameter in parameters:
            slot = self.slots.get(parameter)
            if slot is None:
                found.append(parameter)
            elif slot.shard is not None:
                found.append(slot.shard)
        return found

    @contextmanager
    def shard_groups(self, optimizer: Optimizer, stand_ins: Sequence[list[Tensor]] | None = None) -> Iterator[None]:
        """Within it ``param_groups`` hold what this rank steps instead of the full parameters.

        Args:
            optimizer: The optimizer.
            stand_ins: What each group holds; by default everything that stands in for its parameters.
        """
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        for number, (group, parameters) in enumerate(groups):
            group["params"] = self.stand_ins(parameters) if stand_ins is None else stand_ins[number]
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
        known = next(iter((*self.slots, *self.replicated)), None)
        return torch.device("cpu") if known is None else known.device

    def maximum_over_ranks(self, value: Tensor) -> Tensor:
        """The largest of all ranks' values of a 0-d tensor, in place. Collective; nothing waits on the host."""
        self.reducer.collectives.all_reduce(value, op=dist.ReduceOp.MAX).wait()
        return value

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
            original_step: Its ``step`` before it was sharded, bound to it.
            closure: Evaluated while ``param_groups`` hold the full parameters, or None.
            arguments: Further arguments of the original.

        Returns:
            What the original returns.
        """
        parts: list[_Part] = []
        with ExitStack() as groups, without_step_hooks(optimizer):

            def make_ready() -> None:
                self._make_ready(optimizer)
                parts.extend(self._parts(optimizer))

            def evaluate() -> Any:
                # The closure's forward, backward, clipping and hooks are the user's: they see the full parameters.
                groups.close()
                with torch.enable_grad():
                    loss = closure() if closure is not None else None
                make_ready()
                groups.enter_context(self._stepping(optimizer, parts[0]))
                return loss

            if closure is None:
                make_ready()
                groups.enter_context(self._stepping(optimizer, parts[0]))
                result = original_step(**arguments)
            else:
                groups.enter_context(self.shard_groups(optimizer))
                once = OneEvaluation(evaluate, self.original.__name__)
                result = original_step(**arguments, closure=once)
                if not parts:
                    # It has stepped without asking for gradients.
                    parts.append(_Part(self._stepped_buckets(), []))
            groups.close()
            self._send(parts[0])
            for part in parts[1:]:
                with self._stepping(optimizer, part):
                    original_step(**arguments)
                self._send(part)
        self.gatherer.finish_prompt()
        return result

    @contextmanager
    def _stepping(self, optimizer: Optimizer, part: "_Part") -> Iterator[None]:
        numbers = ", ".join(str(bucket.index) for bucket in part.buckets)
        with marked(f"zero1_custom: step bucket {numbers}"), self.shard_groups(optimizer, part.stand_ins):
            yield

    def _parts(self, optimizer: Optimizer) -> list["_Part"]:
        """What is stepped one after the other, so that the first is in flight while the next steps.

        The next forward reads parameters in the reverse order of their gradients. An optimizer that is not known to
        step each element alone steps once: it may count its steps, or do something once per step.
        """
        # The last gradients to be ready belong to the parameters that the next forward reads first.
        buckets = self._stepped_buckets()[::-1]
        if self.original not in ELEMENTWISE_OPTIMIZERS or len(buckets) < 2:
            return [_Part(buckets, [self.stand_ins(group["params"]) for group in optimizer.param_groups])]
        groups: list[dict[GradientBucket | None, list[Tensor]]] = []
        for group in optimizer.param_groups:
            by_bucket: dict[GradientBucket | None, list[Tensor]] = {}
            for parameter in group["params"]:
                slot = self.slots.get(parameter)
                if slot is None:
                    by_bucket.setdefault(None, []).append(parameter)
                elif slot.shard is not None:
                    by_bucket.setdefault(slot.bucket, []).append(slot.shard)
            groups.append(by_bucket)
        parts = [_Part([bucket], [by_bucket.get(bucket, []) for by_bucket in groups]) for bucket in buckets]
        if any(None in by_bucket for by_bucket in groups):
            parts.append(_Part([], [by_bucket.get(None, []) for by_bucket in groups]))
        return parts

    def _send(self, part: "_Part") -> None:
        for bucket in part.buckets:
            bucket.publish_master_weights()
            self.gatherer.launch(bucket)

    def _make_ready(self, optimizer: Optimizer) -> None:
        """Brings gradients and parameters to the shards."""
        self.gatherer.finish()
        if self.has_added_parameters(optimizer):
            known = len(self.buckets)
            self.adopt_added_parameters()
            self.reducer.reduce_left_over(self.buckets[known:])
        self.finish_gradients()
        for bucket in self.buckets:
            # What the user has written into parameters since the last step (clamped, swapped, loaded) is what steps.
            bucket.copy_in_rebound()
            bucket.refresh_master_weights()

    def _stepped_buckets(self) -> list[ParameterBucket]:
        """Buckets whose parameters may have moved on any rank; all ranks come to the same answer."""
        if self.exposes_gradients or self.original not in ELEMENTWISE_OPTIMIZERS:
            # A user may have set a gradient, and an unknown optimizer may move parameters without one.
            return self.buckets
        return [bucket for bucket in self.buckets if bucket.has_gradients]


class _Part(NamedTuple):
    """Buckets that are stepped by one call, and what each of the optimizer's groups holds of them."""

    buckets: list[ParameterBucket]
    stand_ins: list[list[Tensor]]


class ClosureEvaluatedAgainError(RuntimeError):
    """An optimizer called its closure a second time within one step."""


class OneEvaluation:
    """A closure that may be called once.

    Args:
        closure: What is evaluated.
        optimizer: The optimizer's name, for the message.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: str) -> None:
        self._closure = closure
        self._optimizer = optimizer
        self._evaluated = False

    def __call__(self) -> Any:
        """Returns what the closure does.

        Raises:
            ClosureEvaluatedAgainError: It was called before.
        """
        if self._evaluated:
            raise ClosureEvaluatedAgainError(
                f"{self._optimizer} evaluates its closure more than once per step, which sharded optimizer state does"
                " not allow. Choose an optimizer that needs one evaluation, or `strategy='ddp'`."
            )
        self._evaluated = True
        return self._closure()
