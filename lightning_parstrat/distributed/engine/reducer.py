"""Gradients leave while backward runs: ready hooks, launches in a fixed order, and a flush at the end of backward.

Every rank reduce-scatters the same buckets in the same order, whatever order its gradients arrive in. A bucket leaves
as soon as all gradients it expects have arrived and its predecessors have left. What autograd has not delivered by the
end of backward is settled by flags in the step's control message: buckets that no rank touched are not sent, and a
gradient that came after its bucket had left (or unexpectedly) makes all ranks send that bucket once more and add the
result.

Two rounds, both in index order, keep the ranks in step:

1. the buckets that expect gradients (a set all ranks agree on), during backward and, where some are missing, after it;
2. the buckets in which any rank has gradients left over.

Between the micro-batches of an accumulation window (``no_sync``) gradients wait in ``param.grad``, each rank's own; or,
with ``shards_accumulation``, every micro-batch is reduced as the last one is, and added up in the shards. Parameters
that every rank steps wait in either case: all ranks need all of their gradients.

Where someone reads or changes gradients (``exposes_gradients``), and for parameters that every rank steps, the shards
are gathered again at the end of backward and ``param.grad`` is what DDP would show; else it is None after the flush.
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
from lightning_parstrat.distributed.comm.control_messages import ControlMessage, ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError
from lightning_parstrat.distributed.comm.work import Arrivals, Streams, Work, marked
from lightning_parstrat.distributed.engine.buckets import (
    GradientBucket,
    ParameterSlot,
    ShownMean,
)
from lightning_parstrat.distributed.engine.shown_gradients import expose_gradients
from lightning_parstrat.distributed.torch_compat import (
    accumulated_gradient_hooks,
    call_after_backward,
    current_graph_task_id,
)

GradientScale = Callable[[], float]
"""What makes a mean of the sum over ranks; asked for while the sum is in flight. Collective, as its sources may be.

Of a window whose micro-batches are reduced one by one, it is what makes the mean of the sum of all of them."""

_TRANSFERS_SET_ASIDE: list[Work] = []
"""What a failed backward had launched. A work keeps its buffers, which must outlive the transfers, and its receives
must stay posted: else the next training on these process groups would receive what was meant for this one."""


class _Reduction(NamedTuple):
    """A bucket in flight.

    Attributes:
        bucket: The bucket.
        shard: Has this rank's shard of the sum once ``work`` was waited for.
        unsharded: The buffer of the bucket's length that ``shard`` is a part of; None if no gradient will be exposed.
        work: The transfer.
        applied: A part of the scale, by which gradients were multiplied before the sum.
        shown: What was packed of a mean that ``param.grad`` shows already.
        scale: Makes a mean of the sum; None if more micro-batches follow, of which the last one knows it.
        backward: What it belongs to.
        stream: The one that its memory belongs to.
    """

    bucket: GradientBucket
    shard: Tensor
    unsharded: Tensor | None
    work: Work
    applied: float
    shown: ShownMean
    scale: GradientScale | None
    backward: object
    stream: Hashable


IDLE_BACKWARDS_BEFORE_NOT_AWAITED = 3
"""A trainable parameter that stays without a gradient this often is not waited for; its gradient is still reduced.
More than one, because the optimizers of a GAN alternate."""


@dataclass(slots=True, eq=False, repr=False)
class _Backward:
    """One backward that reduces gradients, from its announcement until all ranks know what came of it.

    Its phases: announced (``graph_task`` is None), running, and agreeing (``message`` is there). The reducer drops it
    when it is settled. If it is still running after backward has returned, an exception has ended it.

    Attributes:
        scale: Turns sums over ranks into means; None within an accumulation window whose end knows it.
        buckets: Those that take part.
        queue: The buckets that all ranks expect gradients for, in the order in which they are sent.
        missing: How many of the expected gradients each of them still waits for.
        launched: How many of the queue have been sent.
        sent: All buckets that have been sent; what is sent of one again is added.
        settles_at_end: Whether backward itself waits for the other ranks' flags.
        graph_task: Autograd's number for it; None until its first gradient is there.
        message: The flags of all ranks, from the end of backward on: one for each parameter that has got a gradient,
            one for each bucket that has some left over, and a number for what was expected.
    """

    scale: GradientScale | None
    buckets: Sequence[GradientBucket]
    missing: dict[GradientBucket, int] = field(default_factory=dict)
    settles_at_end: bool = False
    queue: list[GradientBucket] = field(init=False)
    launched: int = 0
    sent: set[GradientBucket] = field(default_factory=set)
    graph_task: int | None = None
    message: ControlMessage | None = None

    def __post_init__(self) -> None:
        self.queue = list(self.missing)

    @property
    def waiting(self) -> Sequence[GradientBucket]:
        """What of the queue has not been sent."""
        return self.queue[self.launched :]


class GradientReducer:
    """Reduces the gradients of bucketed parameters to the shards of their owners.

    Collective: all ranks must run the same sequence of synchronised backwards and of :meth:`finish` calls. A backward
    costs one reduce-scatter per touched bucket and one control message with a bit per parameter and bucket. A reduction
    holds its bucket's gradients and, exchanged pairwise, about as much again until it has arrived.

    Micro-batches that are reduced one by one add up in the shards, as means over ranks. What makes a mean over all of
    them may be known at the end only: tokens are counted, or an epoch is over.

    Args:
        collectives: Carry the gradients.
        messages: Carry the flags.
        max_inflight: How many buckets may be in flight before backward waits. With such a bound every rank sends all
            buckets that are expected, also those of which no rank turns out to have a gradient.
        streams: Those of the gradients' device; by default a CPU's.
    """

    def __init__(
        self,
        collectives: Collectives,
        messages: ControlMessages,
        max_inflight: int | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.collectives = collectives
        """What carries the gradients."""
        self.max_inflight = max_inflight
        self._messages = messages
        self.follow_streams(streams or Streams())
        self.buckets: list[GradientBucket] = []
        self.exposes_gradients = False
        self.shards_accumulation = False
        self.collects_unannounced = False
        self.synchronize = True
        self._slots: list[ParameterSlot] = []
        self._hooks: dict[ParameterSlot, RemovableHandle] = {}
        self._loss_hook: RemovableHandle | None = None
        self._backward: _Backward | None = None
        self._in_flight: list[_Reduction] = []
        self._not_waited_for: deque[_Reduction] = deque()
        self._partial: list[GradientBucket] = []
        self._window_scale: GradientScale | None = None

    def follow_streams(self, streams: Streams) -> None:
        """Keeps to the order of streams of the gradients' device from now on."""
        self._streams = streams
        self._arrivals = Arrivals(streams) if streams.are_several else None
        """On which streams gradients become ready."""

    @property
    def control(self) -> Collectives:
        """What carries agreements of the hosts."""
        return self._messages.control

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates: local gradients in ``param.grad``, or reduced ones in the shards."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def prepare_backward(self, loss: Tensor, scale: GradientScale | None = None) -> None:
        """Announces the backward of ``loss``; after an exception in the last one, this starts afresh.

        The flush is queued from a hook on the loss: queued from a parameter's hook, it would belong to the inner graph
        task of a reentrant activation checkpoint, and run too early.

        Args:
            loss: What backward is called on.
            scale: What the sum of gradients over ranks is multiplied by; by default 1 over their number. With what was
                accumulated before; within :meth:`no_sync` it is not asked for.
        """
        self._end_backward()
        self._remove_loss_hook()
        if not self.synchronize and not self.shards_accumulation:
            return
        # Several backwards may be stepped as one: their shards are added up as they come, not held one by one.
        self._complete()
        self._let_users_hooks_run_first()
        backward = self._backward = self._begin((scale or self._mean_over_ranks) if self.synchronize else None)
        if loss.requires_grad:
            self._loss_hook = loss.register_hook(lambda _: self._enter(backward))  # type: ignore[no-untyped-call]

    def _begin(self, scale: GradientScale | None) -> _Backward:
        """Fixes which gradients this backward waits for. All ranks come to the same answer."""
        if self._arrivals is not None:
            self._arrivals.begin()
        buckets = self.buckets if scale is not None else self._without_replicated()
        expecting: dict[GradientBucket, int] = {}
        # It must not depend on what this rank finds in backward: a rank that waits there for the flags of others that
        # do not send theirs until they have come to the step would wait for ever.
        settles_at_end = self.exposes_gradients
        for bucket in buckets:
            number = 0
            for slot in bucket.slots:
                slot.arrived = False
                slot.trainable = trainable = slot.parameter.requires_grad
                slot.expected = trainable and slot.idle_backwards < IDLE_BACKWARDS_BEFORE_NOT_AWAITED
                number += slot.expected
                settles_at_end = settles_at_end or (trainable and bucket.is_replicated)
            if number:
                expecting[bucket] = number
        return _Backward(scale, buckets, expecting, settles_at_end)

    def _without_replicated(self) -> list[GradientBucket]:
        """The buckets that are sharded; the others expect no gradients in this backward."""
        for bucket in self.buckets:
            if bucket.is_replicated:
                _expect_nothing(bucket.slots)
        return [bucket for bucket in self.buckets if not bucket.is_replicated]

    def _enter(self, backward: _Backward) -> None:
        # The engine runs callbacks when the graph task that queued them ends, with all its gradients accumulated.
        backward.graph_task = current_graph_task_id()
        call_after_backward(partial(self._flush, backward))

    def _on_gradient_ready(self, slot: ParameterSlot, _: Tensor) -> None:
        """Runs in backward, after a gradient has been accumulated in ``param.grad``."""
        # Also in a backward that nobody announced: `finish` sends what such backwards have left.
        slot.fresh = True
        if self._arrivals is not None:
            self._arrivals.note(slot.bucket)
        backward = self._backward
        if backward is None or backward.message is not None:
            # Nobody announced this backward: the user called `loss.backward()`, who knows on which ranks how often.
            return
        if backward.graph_task is None:
            self._enter(backward)
        if not slot.expected or current_graph_task_id() != backward.graph_task:
            # Within a reentrant checkpoint this may be a part of the gradient: it waits for the flush.
            return
        backward.missing[slot.bucket] -= 1
        if backward.missing[slot.bucket] == 0:
            self._launch_complete_buckets(backward)

    def _launch_complete_buckets(self, backward: _Backward) -> None:
        # In the order of the queue, whatever order they fill in: all ranks must launch alike.
        while backward.launched < len(backward.queue):
            bucket = backward.queue[backward.launched]
            if backward.missing[bucket] > 0:
                return
            backward.launched += 1
            self._launch(backward, bucket)

    def _launch(self, backward: _Backward, bucket: GradientBucket) -> None:
        again = bucket in backward.sent
        shown = (ShownMean.PACKED if again else ShownMean.TO_PACK) if self._exposes(bucket) else ShownMean.ABSENT
        backward.sent.add(bucket)
        self._hold_back()
        own_stream = nullcontext() if self._arrivals is None else self._arrivals.waited_for(bucket)
        with marked(f"zero1_custom: reduce-scatter gradients of bucket {bucket.index}"), torch.no_grad(), own_stream:
            self._in_flight.append(self._send(bucket, shown, backward.scale, backward))
        self._not_waited_for.append(self._in_flight[-1])

    def _flush(self, backward: _Backward) -> None:
        """Runs when backward has ended: sends flags of gradients to the other ranks, and what is complete by them."""
        self._remove_loss_hook()
        if self.max_inflight is not None:
            # Other ranks may be waiting in backward for what is not complete here.
            backward.missing = dict.fromkeys(backward.missing, 0)
            self._launch_complete_buckets(backward)
        self._send_flags(backward)
        if backward.waiting or backward.settles_at_end:
            self._end_backward()

    def _send_flags(self, backward: _Backward) -> None:
        """Sends to the other ranks for which parameters there were gradients, and which buckets have some left over."""
        # Packed gradients are not fresh any more: in most steps none is left.
        left = {
            slot
            for bucket in backward.buckets
            for slot in bucket.slots
            if slot.fresh and slot.parameter.grad is not None
        }
        arrived = [slot.arrived or slot in left for slot in self._slots]
        waiting, with_left = set(backward.waiting), {slot.bucket for slot in left}
        left_over = [bucket in with_left and bucket not in waiting for bucket in self.buckets]
        expectation = zlib.crc32(bytes([slot.expected for slot in self._slots]))
        backward.message = self._messages.launch(bytes([*arrived, *left_over]), expectation)

    def _end_backward(self) -> None:
        """Ends the last backward, if nothing has yet: collective, but for one that an exception had ended."""
        backward, self._backward = self._backward, None
        if backward is None:
            return
        if backward.message is None:
            # Its memory must outlive the transfers.
            self._set_aside(backward)
        else:
            self._settle(backward, backward.message)

    def _settle(self, backward: _Backward, message: ControlMessage) -> None:
        """Receives which parameters any rank has used, and sends what any rank has gradients for."""
        agreed = message.wait()
        if not agreed.is_alike:
            raise NoCollectivesError(
                "The ranks disagree about which parameters are trainable: `requires_grad` must be set alike on all"
                " ranks when backward begins."
            )
        # The flags of buckets follow those of parameters.
        for slot, used in zip(self._slots, agreed.flags, strict=False):
            slot.reduced = bool(used)
            slot.used = slot.used or slot.reduced
            if slot.trainable:
                # By the flags of all ranks: each must come to the same answer about whom the next backward waits for.
                slot.idle_backwards = 0 if used else slot.idle_backwards + 1
        # What no rank has used is not sent at all: the other half of a GAN costs nothing.
        for bucket in backward.waiting:
            if any(slot.reduced for slot in bucket.slots):
                self._launch(backward, bucket)
        left_over = agreed.flags[len(self._slots) :]
        for bucket, needed in zip(self.buckets, left_over, strict=True):
            if needed:
                self._launch(backward, bucket)
        exposed = [bucket for bucket in self.buckets if bucket in backward.sent and self._exposes(bucket)]
        self._complete(exposed)
        if exposed:
            expose_gradients(exposed, self.collectives)
        # What is left over of a window may be sent after its last backward: the window's scale was there first.
        if backward.scale is not None and self._partial and self._window_scale is None:
            self._window_scale = backward.scale

    def _send(
        self, bucket: GradientBucket, shown: ShownMean, scale: GradientScale | None, backward: object
    ) -> _Reduction:
        buffer = bucket.pack_gradients(shown)
        if scale is None and not bucket.is_partial:
            bucket.is_partial = True
            self._partial.append(bucket)
        applied = 1.0
        if buffer.dtype == torch.float16 and self.collectives.world_size > 1:
            # A sum over ranks overflows in float16 where the mean does not.
            applied = 1.0 / self.collectives.world_size
            buffer.mul_(applied)
        shard, unsharded = bucket.room_for_sum(buffer, shown is not ShownMean.ABSENT, self.collectives.sends_nothing)
        work = self.collectives.reduce_scatter(buffer, shard, bucket.layout.bounds)
        return _Reduction(bucket, shard, unsharded, work, applied, shown, scale, backward, self._streams.current())

    def _hold_back(self) -> None:
        waiting = self._not_waited_for
        # Only who waits for a work makes it let go of its buffers.
        while waiting and (waiting[0].work.is_completed() or len(waiting) == self.max_inflight):
            self._wait(waiting.popleft(), "zero1_custom: hold backward back, max_inflight_buckets")

    def _wait(self, reduction: _Reduction, mark: str) -> None:
        # What has been waited for lets go of its memory, which then is that stream's again.
        with marked(mark), self._streams.on(reduction.stream):
            self.collectives.wait(reduction.work)
        if self._streams.current() != reduction.stream:
            self._streams.wait_for(reduction.stream)

    def _complete(self, buckets: Collection[GradientBucket] | None = None) -> None:
        """Waits for the reductions of ``buckets`` (by default all) and leaves the mean gradients in their shards."""
        if self._in_flight:
            self._add_up(buckets)
        if self._window_scale is not None and not self._in_flight:
            self._close_window(self._window_scale)

    def _close_window(self, scale: GradientScale) -> None:
        """Brings the sums of means over ranks to the mean over the window, also of buckets that its end did not use."""
        partial, self._partial, self._window_scale = self._partial, [], None
        factor = scale() * self.collectives.world_size
        for bucket in partial:
            bucket.end_partial_sum(factor)

    def _add_up(self, buckets: Collection[GradientBucket] | None) -> None:
        pending, self._in_flight = self._in_flight, []
        if buckets is not None:
            self._in_flight = [reduction for reduction in pending if reduction.bucket not in buckets]
            pending = [reduction for reduction in pending if reduction.bucket in buckets]
        self._not_waited_for = deque(self._in_flight)
        # In the order of their launch, in which they arrive.
        for reduction in pending:
            bucket, scale = reduction.bucket, reduction.scale
            self._wait(reduction, f"zero1_custom: wait for gradients of bucket {bucket.index}")
            # Asked for now, not at launch: the weights of a window are summed while its gradients travel.
            mean = 1.0 / self.collectives.world_size if scale is None or bucket.is_partial else scale()
            if mean != reduction.applied:
                reduction.shard.mul_(mean / reduction.applied)
            # An exposed gradient was packed with what it had accumulated before, so that the sum takes its place.
            if bucket.shard_gradient is None or reduction.shown is ShownMean.TO_PACK:
                bucket.shard_gradient, bucket.unsharded_gradient = reduction.shard, reduction.unsharded
            else:
                if bucket.is_partial:
                    # Zeroed in place, it is as narrow as after a window.
                    bucket.shard_gradient = bucket.shard_gradient.to(bucket.sum_dtype)
                bucket.shard_gradient.add_(reduction.shard)
        for bucket in {reduction.bucket for reduction in pending if reduction.shown is ShownMean.ABSENT}:
            bucket.attach_gradients()

    def _set_aside(self, backward: object | None = None) -> None:
        """Forgets those of one backward, or all; their memory must outlive the transfers."""
        _TRANSFERS_SET_ASIDE[:] = [work for work in _TRANSFERS_SET_ASIDE if not work.is_completed()]
        for reduction in self._in_flight:
            if backward in (None, reduction.backward):
                _TRANSFERS_SET_ASIDE.append(reduction.work)
        self._in_flight = [one for one in self._in_flight if backward not in (None, one.backward)]
        self._not_waited_for = deque(self._in_flight)

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Waits for the reductions and leaves the mean gradients in the shards of ``buckets``.

        Collective. Called again before the next backward, it takes over what was written into exposed gradients.
        """
        self._end_backward()
        if self.collects_unannounced:
            self.reduce_left_over(buckets)
        self._complete()
        if self.exposes_gradients:
            for bucket in buckets:
                bucket.attach_exposed_gradients()

    def complete(self) -> None:
        """Waits for the reductions of backwards that nobody has stepped yet. Collective."""
        self._end_backward()
        self._complete()

    def reduce_left_over(self, buckets: Sequence[GradientBucket], scale: GradientScale | None = None) -> None:
        """Sends gradients that are in ``param.grad`` and were not reduced by any announced backward. Collective.

        One control message, and a reduce-scatter for each of ``buckets`` in which any rank has some.

        Args:
            buckets: Those to look into.
            scale: See :meth:`prepare_backward`.
        """
        self._end_backward()
        _expect_nothing(self._slots)
        # A backward in which nothing was expected, and everything is left over.
        self._backward = _Backward(scale or self._mean_over_ranks, buckets)
        self._send_flags(self._backward)
        self._end_backward()

    def zero(self, slots: Collection[ParameterSlot], set_to_none: bool = True) -> None:
        """Forgets the reduced gradients of ``slots``; reductions in flight are waited for first. Collective."""
        self.complete()
        for bucket in dict.fromkeys([slot.bucket for slot in slots]):
            bucket.zero_gradients(slots, set_to_none)

    def add_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Takes charge of further buckets; call it outside of backward, on all ranks alike."""
        self._end_backward()
        self.buckets += buckets
        for bucket in buckets:
            for slot in bucket.slots:
                # What was accumulated before it was in this bucket is as good as new.
                slot.fresh = slot.parameter.grad is not None
                self._slots.append(slot)
                self._register_hook(slot)

    def dissolve_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Lets go of buckets whose parameters get others; call it outside of backward, on all ranks alike.

        A reduced gradient that is shown in ``param.grad`` stays there, and so finds its way into the new bucket.
        """
        self._end_backward()
        self.buckets = [bucket for bucket in self.buckets if bucket not in buckets]
        self._slots = [slot for slot in self._slots if slot.bucket not in buckets]
        for bucket in buckets:
            if self._arrivals is not None:
                self._arrivals.forget(bucket)
            for slot in bucket.slots:
                self._hooks.pop(slot).remove()

    def close(self) -> None:
        """Ends what was never stepped, and lets go of all parameters. Collective, but after a backward that raised."""
        # In the middle of a backward the ranks may have launched different buckets: nobody can wait for those.
        if self._backward is None or self._backward.message is not None:
            self.complete()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of all parameters and forgets what is in flight; other ranks may be gone. Not collective."""
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
        """Puts hooks that users have registered since before ours, which may take the gradient away."""
        slots = list(self._hooks)
        registered = map(accumulated_gradient_hooks, [slot.parameter for slot in slots])
        for slot, hook, ids in zip(slots, self._hooks.values(), registered, strict=True):
            if ids and next(reversed(ids)) != hook.id:
                hook.remove()
                self._register_hook(slot)


def _expect_nothing(slots: Iterable[ParameterSlot]) -> None:
    for slot in slots:
        slot.arrived = slot.trainable = slot.expected = False
