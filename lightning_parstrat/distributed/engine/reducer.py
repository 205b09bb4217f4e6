"""Gradients are sent while backward runs: ready hooks, launches in a fixed order, and the rest when backward has ended.

Every rank reduce-scatters the same buckets in the same order. The order in which gradients arrive does not matter. A
bucket is sent when all its expected gradients have arrived and its predecessors have been sent. At the end of backward,
flags in the step's control message settle what autograd has not delivered. Buckets that no rank touched are not sent. A
gradient may come unexpectedly, or after its bucket was sent. Then all ranks send that bucket once more and add the
result.

Two rounds, both in index order, keep the ranks synchronized:

1. Buckets that expect gradients (all ranks agree on the set) are sent during backward. If gradients are missing, their
   buckets follow after backward.
2. Buckets in which any rank has gradients left over are sent.

Within an accumulation window (``no_sync``), each rank's gradients wait in ``param.grad`` between micro-batches. With
``shards_accumulation``, every micro-batch is reduced as the last one is, and added up in the shards. Parameters that
every rank steps wait in either case: all ranks need all of their gradients.

If a callback or hook reads or changes gradients (``exposes_gradients``), shards are gathered again at the end of
backward. The same is done for parameters that every rank steps. ``param.grad`` is then what DDP would show. Otherwise
it is None when backward has ended.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.control_messages import Content, ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError
from lightning_parstrat.distributed.comm.work import Arrivals, Exchange, Streams, Work, marked, set_aside
from lightning_parstrat.distributed.engine.buckets import GradientBucket, ParameterSlot
from lightning_parstrat.distributed.engine.shown_gradients import expose_gradients
from lightning_parstrat.distributed.torch_compat import (
    accumulated_gradient_hooks,
    current_graph_task_id,
)

GradientScale = Callable[[], float]
"""The factor that makes a mean of the sum over ranks. It is computed while the sum is in flight. The call is
collective, as its sources may be.

If a window's micro-batches are reduced one by one, the factor makes the mean over all of them."""


class _Reduction(NamedTuple):
    """A bucket in flight.

    Attributes:
        bucket: The bucket.
        shard: This rank's shard of the sum, after a wait for ``work``.
        unsharded: The buffer of the bucket's length that contains ``shard``. If no gradient will be exposed, None.
        work: The transfer.
        applied: A part of the scale, by which gradients were multiplied before the sum.
        again: Whether the bucket was sent before in this backward.
        scale: Makes a mean of the sum. If more micro-batches follow, None: the last one has the scale.
        stream: The stream that owns the reduction's memory.
    """

    bucket: GradientBucket
    shard: Tensor
    unsharded: Tensor | None
    work: Work
    applied: float
    again: bool
    scale: GradientScale | None
    stream: Hashable


IDLE_BACKWARDS_BEFORE_NOT_AWAITED = 3
"""A trainable parameter without a gradient in so many backwards is not waited for. Its gradient is still reduced. The
number is more than one, because the optimizers of a GAN alternate."""


@dataclass(slots=True, eq=False, repr=False)
class _Backward:
    """One backward that reduces gradients, from its announcement until all ranks know its result.

    Its phases: announced (``graph_task`` is None), running, and agreeing (``message`` is set). The reducer drops a
    settled backward. If it is still running after backward has returned, an exception has ended it.

    Attributes:
        scale: Turns sums over ranks into means. If a later micro-batch has the scale, None.
        buckets: The buckets that take part.
        missing: How many gradients each bucket still waits for, if all ranks expect any for it.
        settles_at_end: Whether backward itself waits for the other ranks' flags.
        queue: Those buckets, without the ones that were sent, in the order in which they are sent.
        sent: All buckets that have been sent. If a bucket is sent again, the result is added.
        graph_task: Autograd's number for the backward. Before the first gradient, None.
        message: The flags of all ranks, from the end of backward on. One flag for each parameter that has a gradient,
            and one for each bucket with gradients left over. A number describes what was expected.
    """

    scale: GradientScale | None
    buckets: Sequence[GradientBucket]
    missing: dict[GradientBucket, int] = field(default_factory=dict)
    settles_at_end: bool = False
    queue: deque[GradientBucket] = field(init=False)
    sent: set[GradientBucket] = field(default_factory=set)
    graph_task: int | None = None
    message: Exchange | None = None

    def __post_init__(self) -> None:
        self.queue = deque(self.missing)


class GradientReducer:
    """Reduces the gradients of bucketed parameters to the shards of their owners.

    Collective: all ranks must run the same sequence of synchronized backwards and of :meth:`finish` calls. A backward
    costs one reduce-scatter per touched bucket. It also costs one control message with a bit per parameter and bucket.
    A reduction holds its bucket's gradients. If it is exchanged pairwise, it holds about as much again until it has
    arrived.

    Micro-batches that are reduced one by one add up in the shards, as means over ranks. The mean over all of them may
    be known at the end only: tokens are counted, or an epoch ends.

    Args:
        collectives: Carry the gradients.
        messages: Carry the flags.
        max_inflight: How many buckets may be in flight before backward waits. With such a bound, every rank sends all
            expected buckets. Some of them may have no gradient on any rank.
        streams: Streams of the gradients' device. By default, a CPU's.
    """

    def __init__(
        self,
        collectives: Collectives,
        messages: ControlMessages,
        max_inflight: int | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.collectives = collectives
        """Carries the gradients."""
        self.max_inflight = max_inflight
        self._messages = messages
        self._streams = streams or Streams()
        self._arrivals = Arrivals(self._streams) if self._streams.are_several else None
        """On which streams gradients become ready."""
        self.buckets: list[GradientBucket] = []
        self.exposes_gradients = False
        self.shards_accumulation = False
        self.collects_unannounced = False
        self.synchronize = True
        self.recorded: dict[ParameterSlot, None] | None = None
        """If set, the order in which gradients become ready is recorded here, and none is sent."""
        self._hooks: dict[ParameterSlot, RemovableHandle] = {}
        self._loss_hook: RemovableHandle | None = None
        self._backward: _Backward | None = None
        self._in_flight: list[_Reduction] = []
        self._not_waited_for: deque[_Reduction] = deque()
        self._window_scale: GradientScale | None = None

    @property
    def control(self) -> Collectives:
        """Carries agreements of the hosts."""
        return self._messages.control

    @property
    def _slots(self) -> list[ParameterSlot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates: local gradients in ``param.grad``, or reduced ones in the shards."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def prepare_backward(self, loss: Tensor, scale: GradientScale | None = None) -> None:
        """Announces the backward of ``loss``. After an exception in the last backward, this starts over.

        Call :meth:`end_backward` after it. A hook on the loss notes its graph task: that of a gradient could be the
        inner one of a reentrant activation checkpoint.

        Args:
            loss: The tensor on which backward is called.
            scale: The factor for the sum of gradients over ranks, earlier accumulated ones included. By default, 1 over
                the number of ranks. Within :meth:`no_sync` it is not used.
        """
        self._end_backward()
        self._remove_loss_hook()
        if not self.synchronize and not self.shards_accumulation:
            return
        # Several backwards may be stepped as one. Their shards are added up as they arrive, not held one by one.
        self._complete()
        self._let_users_hooks_run_first()
        backward = self._backward = self._begin((scale or self._mean_over_ranks) if self.synchronize else None)
        if loss.requires_grad:
            self._loss_hook = loss.register_hook(lambda _: self._enter(backward))  # type: ignore[no-untyped-call]

    def _begin(self, scale: GradientScale | None) -> _Backward:
        """Decides which gradients this backward waits for. All ranks decide the same."""
        if self._arrivals is not None:
            self._arrivals.begin()
        # Between micro-batches, gradients that every rank steps stay in `param.grad`.
        buckets = [bucket for bucket in self.buckets if scale is not None or not bucket.is_replicated]
        _expect_nothing(self._slots)
        expecting: dict[GradientBucket, int] = {}
        # It must not depend on what this rank finds in backward. Otherwise a rank could wait there for the flags of
        # others for ever: they send theirs only at the step.
        settles_at_end = self.exposes_gradients
        for bucket in buckets:
            number = 0
            for slot in bucket.slots:
                slot.trainable = trainable = slot.parameter.requires_grad
                slot.expected = trainable and slot.idle_backwards < IDLE_BACKWARDS_BEFORE_NOT_AWAITED
                number += slot.expected
                settles_at_end = settles_at_end or (trainable and bucket.is_replicated)
            if number:
                expecting[bucket] = number
        return _Backward(scale, buckets, expecting, settles_at_end)

    def _enter(self, backward: _Backward) -> None:
        # Again, if the program has called `torch.autograd.grad` for the same loss before.
        backward.graph_task = current_graph_task_id()

    def _on_gradient_ready(self, slot: ParameterSlot, _: Tensor) -> None:
        """Runs in backward, after a gradient has been accumulated in ``param.grad``."""
        # Also in an unannounced backward: `finish` sends the gradients that such backwards leave.
        slot.fresh = True
        if self._arrivals is not None:
            self._arrivals.note(slot.bucket)
        if self.recorded is not None:
            # Within reentrant checkpoints a gradient comes in parts: the last one counts.
            self.recorded.pop(slot, None)
            self.recorded[slot] = None
            return
        backward = self._backward
        if backward is None or backward.message is not None:
            # This backward was not announced: the user called `loss.backward()`, and knows on which ranks how often.
            return
        if backward.graph_task is None:
            self._enter(backward)
        if not slot.expected or current_graph_task_id() != backward.graph_task:
            # Within a reentrant checkpoint this may be a part of the gradient: it waits for the end.
            return
        backward.missing[slot.bucket] -= 1
        if backward.missing[slot.bucket] == 0:
            self._launch_complete_buckets(backward)

    def _launch_complete_buckets(self, backward: _Backward) -> None:
        # In the order of the queue, not in the order in which buckets fill: all ranks must launch alike.
        while backward.queue and backward.missing[backward.queue[0]] <= 0:
            self._launch(backward, backward.queue.popleft())

    def _launch(self, backward: _Backward, bucket: GradientBucket) -> None:
        again = bucket in backward.sent
        backward.sent.add(bucket)
        waiting = self._not_waited_for
        # Only waiting for a work frees its buffers.
        while waiting and (waiting[0].work.is_completed() or len(waiting) == self.max_inflight):
            self._wait(waiting.popleft(), "zero1_custom: hold backward back, max_inflight_buckets")
        own_stream = nullcontext() if self._arrivals is None else self._arrivals.waited_for(bucket)
        with marked(f"zero1_custom: reduce-scatter gradients of bucket {bucket.index}"), torch.no_grad(), own_stream:
            self._in_flight.append(self._send(bucket, again, backward.scale))
        self._not_waited_for.append(self._in_flight[-1])

    def end_backward(self) -> bool:
        """Call after a backward that was announced: sends flags of gradients, and the buckets that are complete.

        Returns:
            Whether it was still announced. Otherwise gradients may be left in ``param.grad``, as after :meth:`zero`.
        """
        backward = self._backward
        self._remove_loss_hook()
        if backward is None or backward.message is not None:
            return False
        if self.max_inflight is not None:
            # Other ranks may be waiting in backward for buckets that are not complete here.
            backward.missing = dict.fromkeys(backward.missing, 0)
            self._launch_complete_buckets(backward)
        self._send_flags(backward)
        if backward.queue or backward.settles_at_end:
            self._end_backward()
        return True

    def _send_flags(self, backward: _Backward) -> None:
        """Sends flags to the other ranks: which parameters had gradients, and which buckets have some left over."""
        # Packed gradients are not fresh any more: in most steps none is left.
        left = {
            slot
            for bucket in backward.buckets
            for slot in bucket.slots
            if slot.fresh and slot.parameter.grad is not None
        }
        slots = self._slots
        arrived = [slot.arrived or slot in left for slot in slots]
        waiting, with_left = set(backward.queue), {slot.bucket for slot in left}
        left_over = [bucket in with_left and bucket not in waiting for bucket in self.buckets]
        expectation = zlib.crc32(bytes([slot.expected for slot in slots]))
        backward.message = self._messages.launch(bytes([*arrived, *left_over]), expectation)

    def _end_backward(self) -> None:
        """Ends the last backward, if it has not ended. Collective, except after an exception in that backward."""
        backward, self._backward = self._backward, None
        if backward is None:
            return
        if backward.message is None:
            # The memory must outlive the transfers.
            self._set_aside()
        else:
            self._settle(backward, backward.message)

    def _settle(self, backward: _Backward, message: Exchange) -> None:
        """Receives which parameters any rank has used, and sends the gradients that any rank has."""
        with marked("lightning_parstrat: wait for control message"):
            agreed: Content = message.wait()
        if not agreed.is_alike:
            raise NoCollectivesError(
                "The ranks disagree about which parameters are trainable: `requires_grad` must be set alike on all"
                " ranks when backward begins."
            )
        # The flags of buckets follow those of parameters.
        slots = self._slots
        for slot, used in zip(slots, agreed.flags, strict=False):
            slot.reduced = bool(used)
            slot.used = slot.used or slot.reduced
            if slot.trainable:
                # Decided by the flags of all ranks: each must reach the same answer about what the next backward waits
                # for.
                slot.idle_backwards = 0 if used else slot.idle_backwards + 1
        # Buckets that no rank has used are not sent at all: the other half of a GAN costs nothing.
        for bucket in backward.queue:
            if any(slot.reduced for slot in bucket.slots):
                self._launch(backward, bucket)
        left_over = agreed.flags[len(slots) :]
        for bucket, needed in zip(self.buckets, left_over, strict=True):
            if needed:
                self._launch(backward, bucket)
        exposed = [bucket for bucket in self.buckets if bucket in backward.sent and self._exposes(bucket)]
        if exposed:
            self._complete()
            expose_gradients(exposed, self.collectives)
        # Gradients left over from a window may be sent after its last backward: the window's scale was set before.
        if backward.scale is not None and any(b.is_partial for b in self.buckets) and self._window_scale is None:
            self._window_scale = backward.scale

    def _send(self, bucket: GradientBucket, again: bool, scale: GradientScale | None) -> _Reduction:
        exposes = self._exposes(bucket)
        buffer = bucket.pack_gradients(exposes, again)
        bucket.is_partial = bucket.is_partial or scale is None
        applied = 1.0
        if buffer.dtype == torch.float16 and self.collectives.world_size > 1:
            # If the mean fits into float16, a sum over ranks may still overflow.
            applied = 1.0 / self.collectives.world_size
            buffer.mul_(applied)
        unsharded: Tensor | None = None
        if exposes:
            # The shard lies at the all-gather's place for it, so that exposing the sum copies nothing.
            unsharded = torch.empty_like(buffer, dtype=bucket.dtype)
            shard = bucket.shard_of(unsharded)
        else:
            kept_in = bucket.sum_dtype if bucket.is_partial else bucket.shard_dtype
            # A rank alone keeps its gradients.
            is_alone = self.collectives.world_size == 1 and buffer.dtype == kept_in
            shard = buffer if is_alone else buffer.new_empty(bucket.shard_numel, dtype=kept_in)
        work = self.collectives.reduce_scatter(buffer, shard, bucket.layout.bounds)
        return _Reduction(bucket, shard, unsharded, work, applied, again, scale, self._streams.current())

    def _wait(self, reduction: _Reduction, mark: str) -> None:
        # A wait frees the memory of the work, which then belongs to that stream again.
        here = self._streams.current()
        with marked(mark), self._streams.on(reduction.stream):
            self.collectives.wait(reduction.work)
        if here != reduction.stream:
            self._streams.wait_for(reduction.stream)

    def _complete(self) -> None:
        """Waits for the reductions. The mean gradients are then in their shards."""
        if self._in_flight:
            self._add_up()
        scale, self._window_scale = self._window_scale, None
        if scale is not None:
            # Turns sums of means over ranks into the mean over the window, also for buckets that its end did not use.
            factor = scale() * self.collectives.world_size
            for bucket in self.buckets:
                bucket.end_partial_sum(factor)

    def _add_up(self) -> None:
        pending, self._in_flight = self._in_flight, []
        self._not_waited_for.clear()
        # In the order of launches, in which the reductions arrive.
        for reduction in pending:
            bucket, scale = reduction.bucket, reduction.scale
            self._wait(reduction, f"zero1_custom: wait for gradients of bucket {bucket.index}")
            # Computed now, not at launch: the weights of a window are summed while its gradients are in flight.
            mean = 1.0 / self.collectives.world_size if scale is None or bucket.is_partial else scale()
            if mean != reduction.applied:
                reduction.shard.mul_(mean / reduction.applied)
            # An exposed gradient was packed together with its accumulated part, so the sum replaces it.
            if bucket.shard_gradient is None or (reduction.unsharded is not None and not reduction.again):
                bucket.shard_gradient, bucket.unsharded_gradient = reduction.shard, reduction.unsharded
            else:
                if bucket.is_partial:
                    # After zeroing in place, the shard has the narrow dtype, as after a window.
                    bucket.shard_gradient = bucket.shard_gradient.to(bucket.sum_dtype)
                bucket.shard_gradient.add_(reduction.shard)
        for bucket in {reduction.bucket for reduction in pending if reduction.unsharded is None}:
            bucket.attach_gradients()

    def _set_aside(self) -> None:
        """Drops the reductions in flight. Their memory must outlive the transfers."""
        set_aside([reduction.work for reduction in self._in_flight])
        self._in_flight = []
        self._not_waited_for.clear()

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Waits for the reductions. The mean gradients are then in the shards of ``buckets``.

        Collective. If called again before the next backward, it takes over changes to exposed gradients.
        """
        self._end_backward()
        if self.collects_unannounced:
            self.reduce_left_over(buckets)
        self._complete()
        if self.exposes_gradients:
            for bucket in buckets:
                bucket.attach_exposed_gradients()

    def complete(self) -> None:
        """Waits for the reductions of backwards that were not stepped yet. Collective."""
        self._end_backward()
        self._complete()

    def reduce_left_over(self, buckets: Sequence[GradientBucket], scale: GradientScale | None = None) -> None:
        """Sends gradients in ``param.grad`` that no announced backward has reduced. Collective.

        It costs one control message, and a reduce-scatter for each of ``buckets`` in which any rank has such gradients.

        Args:
            buckets: Buckets to search.
            scale: See :meth:`prepare_backward`.
        """
        self._end_backward()
        _expect_nothing(self._slots)
        # A backward that expects nothing. All gradients are left over.
        self._backward = _Backward(scale or self._mean_over_ranks, buckets)
        self._send_flags(self._backward)
        self._end_backward()

    def zero(self, slots: Collection[ParameterSlot], set_to_none: bool = True) -> None:
        """Drops the reduced gradients of ``slots``, after waiting for reductions in flight. Collective."""
        self.complete()
        for bucket in dict.fromkeys([slot.bucket for slot in slots]):
            bucket.zero_gradients(slots, set_to_none)

    def add_bucket(self, bucket: GradientBucket) -> None:
        """Adds a bucket. Call it outside of backward, on all ranks alike."""
        self._end_backward()
        self.buckets.append(bucket)
        for slot in bucket.slots:
            # Gradients accumulated before the parameter was in this bucket count as new.
            slot.fresh = slot.parameter.grad is not None
            self._register_hook(slot)

    def dissolve_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Removes buckets whose parameters get other buckets. Call it outside of backward, on all ranks alike.

        A reduced gradient that ``param.grad`` shows stays there, and so gets into the new bucket.
        """
        self._end_backward()
        self.buckets = [bucket for bucket in self.buckets if bucket not in buckets]
        for bucket in buckets:
            if self._arrivals is not None:
                self._arrivals.forget(bucket)
            for slot in bucket.slots:
                self._hooks.pop(slot).remove()

    def close(self) -> None:
        """Ends reductions that were never stepped, and releases all parameters.

        Collective, but not after a backward that raised.
        """
        # In the middle of a backward, ranks may have launched different buckets. Waiting for those is impossible.
        if self._backward is None or self._backward.message is not None:
            self.complete()
        self.abandon()

    def abandon(self) -> None:
        """Releases all parameters and drops what is in flight. Other ranks may have ended. Not collective."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._remove_loss_hook()
        self._set_aside()
        self._backward = None

    def _mean_over_ranks(self) -> float:
        return 1.0 / self.collectives.world_size

    def _exposes(self, bucket: GradientBucket) -> bool:
        return self.exposes_gradients or bucket.is_replicated

    def _remove_loss_hook(self) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()
            self._loss_hook = None

    def _register_hook(self, slot: ParameterSlot) -> None:
        """Registers a hook for accumulated gradients, on a frozen parameter too: it may be trained later."""
        parameter = slot.parameter
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        hook = partial(self._on_gradient_ready, slot)
        self._hooks[slot] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trainable)

    def _let_users_hooks_run_first(self) -> None:
        """Puts hooks that users have registered since before ours. Our hook may set the gradient to None."""
        slots = list(self._hooks)
        registered = map(accumulated_gradient_hooks, [slot.parameter for slot in slots])
        for slot, hook, ids in zip(slots, self._hooks.values(), registered, strict=True):
            if ids and next(reversed(ids)) != hook.id:
                hook.remove()
                self._register_hook(slot)


def _expect_nothing(slots: Iterable[ParameterSlot]) -> None:
    for slot in slots:
        slot.arrived = slot.trainable = slot.expected = False
