"""Reduce-scatters in flight, and what becomes of them: a bucket's mean gradient, in the shard of its owner."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.streams import Arrivals, Streams
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.profiling import marked
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ShownMean
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket, take_where_changed

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
        shown: See :meth:`Reductions.launch`.
        scale: See :meth:`Reductions.launch`.
        backward: See :meth:`Reductions.launch`.
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


class Reductions:
    """Launches reduce-scatters and completes them.

    A reduction holds its bucket's gradients and, exchanged pairwise, about as much again until it has arrived.

    Micro-batches that are reduced one by one add up in the shards, as means over ranks. What makes a mean over all of
    them may be known at the end only (tokens are counted, an epoch is over), and comes with :meth:`end_window`.

    Args:
        collectives: Carry the gradients.
        max_inflight: How many may be in flight before :meth:`launch` waits for the first of them; None for any
            number. Only where every rank sends all buckets it is expected to, whether or not it has their gradients:
            else a rank that waits in backward may wait for one that waits for the flags of all.
        streams: Those of the gradients' device; by default a CPU's.
    """

    def __init__(
        self, collectives: Collectives, max_inflight: int | None = None, streams: Streams | None = None
    ) -> None:
        self.collectives = collectives
        self.max_inflight = max_inflight
        self._streams = streams or Streams()
        self.arrivals = Arrivals(self._streams) if self._streams.are_several else None
        """On which streams gradients become ready."""
        self._in_flight: list[_Reduction] = []
        self._not_waited_for: deque[_Reduction] = deque()
        self._partial: list[GradientBucket] = []
        self._window_scale: GradientScale | None = None

    def launch(self, bucket: GradientBucket, shown: ShownMean, scale: GradientScale | None, backward: object) -> None:
        """Packs and sends the local gradients of ``bucket``. Collective: the same buckets in the same order.

        Args:
            bucket: The bucket.
            shown: What is packed of a mean that ``param.grad`` shows already.
            scale: Makes a mean of the sum; None if more micro-batches follow, of which the last one knows it.
            backward: What it belongs to, for :meth:`set_aside`.
        """
        self._hold_back()
        own_stream = nullcontext() if self.arrivals is None else self.arrivals.waited_for(bucket)
        with marked(f"zero1_custom: reduce-scatter gradients of bucket {bucket.index}"), torch.no_grad(), own_stream:
            self._in_flight.append(self._send(bucket, shown, scale, backward))
        self._not_waited_for.append(self._in_flight[-1])

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
        shard, unsharded = self._room(bucket, buffer, shown is not ShownMean.ABSENT)
        work = self.collectives.reduce_scatter(buffer, shard, bucket.layout.bounds)
        return _Reduction(bucket, shard, unsharded, work, applied, shown, scale, backward, self._streams.current())

    def _room(self, bucket: GradientBucket, buffer: Tensor, exposes: bool) -> tuple[Tensor, Tensor | None]:
        """Where the shard of the sum of ``buffer`` goes, and of what it is a part where it is to be exposed."""
        kept_in = bucket.dtype if exposes else bucket.sum_dtype if bucket.is_partial else bucket.shard_dtype
        if self.collectives.sends_nothing and buffer.dtype == kept_in:
            # What was packed is the sum.
            return bucket.shard_of(buffer), buffer if exposes else None
        if not exposes:
            numel = bucket.layout.shard_numel(bucket.place.shard)
            return buffer.new_empty(numel, dtype=kept_in), None
        # The shard lies where the all-gather wants it, so that exposing it copies nothing.
        unsharded = torch.empty_like(buffer, dtype=kept_in)
        return bucket.shard_of(unsharded), unsharded

    def _hold_back(self) -> None:
        waiting = self._not_waited_for
        # Only who waits for a work makes it let go of its buffers.
        while waiting and (waiting[0].work.is_completed() or len(waiting) == self.max_inflight):
            with marked("zero1_custom: hold backward back, max_inflight_buckets"):
                self._wait(waiting.popleft())

    def _wait(self, reduction: _Reduction) -> None:
        # What has been waited for lets go of its memory, which then is that stream's again.
        with self._streams.on(reduction.stream):
            self.collectives.wait(reduction.work)
        if self._streams.current() != reduction.stream:
            self._streams.wait_for(reduction.stream)

    def complete(self, buckets: Collection[GradientBucket] | None = None) -> None:
        """Waits for the reductions of ``buckets`` (by default all) and leaves the mean gradients in their shards."""
        if self._in_flight:
            self._add_up(buckets)
        if self._window_scale is not None and not self._in_flight:
            self._close_window(self._window_scale)

    def end_window(self, scale: GradientScale) -> None:
        """Ends a window: no more micro-batches follow those that were reduced one by one, if any were.

        :meth:`complete` then asks for the scale, collectively as it may be.

        Args:
            scale: Makes the mean over all of them of the sum over ranks and micro-batches.
        """
        # What is left over of a window may be sent after its last backward: the window's scale was there first.
        if self._partial and self._window_scale is None:
            self._window_scale = scale

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
            with marked(f"zero1_custom: wait for gradients of bucket {bucket.index}"):
                self._wait(reduction)
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

    def set_aside(self, backward: object | None = None) -> None:
        """Forgets those of one backward, or all; their memory must outlive the transfers."""
        _TRANSFERS_SET_ASIDE[:] = [work for work in _TRANSFERS_SET_ASIDE if not work.is_completed()]
        for reduction in self._in_flight:
            if backward in (None, reduction.backward):
                _TRANSFERS_SET_ASIDE.append(reduction.work)
        self._in_flight = [one for one in self._in_flight if backward not in (None, one.backward)]
        self._not_waited_for = deque(self._in_flight)


def expose_gradients(buckets: Sequence[GradientBucket], collectives: Collectives) -> None:
    """Gathers the reduced gradients of buckets and makes ``param.grad`` views of them.

    Collective: one all-gather per bucket. Parameters that no rank had a gradient for keep what they have. This rank's
    shard is a part of the gathered buffer, so what is written into ``param.grad`` in place is what steps.

    Args:
        buckets: Those reduced in this backward, in the same order on all ranks.
        collectives: The reducer's.
    """
    gathers = []
    for bucket in buckets:
        with marked(f"zero1_custom: all-gather gradients of bucket {bucket.index}"):
            gathers.append((bucket, collectives.all_gather(_unsharded_gradient(bucket), bucket.layout.bounds)))
    for bucket, work in gathers:
        with marked(f"zero1_custom: wait for all-gathered gradients of bucket {bucket.index}"):
            collectives.wait(work)
        for slot in bucket.slots:
            # What no rank used keeps its None, and so neither decays nor moves by its momentum.
            if slot.reduced:
                slot.parameter.grad = slot.view_into(_unsharded_gradient(bucket))
        if bucket.is_replicated:
            # From here on `param.grad` is all that holds it, and zeroing it frees it.
            bucket.shard_gradient = bucket.unsharded_gradient = None


@contextmanager
def full_gradients(buckets: Sequence[ParameterBucket], collectives: Collectives) -> Iterator[None]:
    """Within it ``param.grad`` holds the mean gradients; what is changed there is what steps afterwards.

    Collective: one all-gather per bucket that has gradients. Needs memory for all gradients while it lasts.

    Args:
        buckets: Those to show, after the reductions have finished.
        collectives: The reducer's.
    """
    shown = [bucket for bucket in buckets if bucket.shard_gradient is not None]
    show_full_gradients(shown, collectives)
    try:
        yield
    finally:
        for bucket in shown:
            _take_back(bucket)


def show_full_gradients(buckets: Sequence[ParameterBucket], collectives: Collectives) -> None:
    """Has ``param.grad`` show the mean gradients of buckets that have some. Collective: one all-gather per bucket."""
    for bucket in buckets:
        bucket.unsharded_gradient = torch.empty_like(bucket.flat)
        bucket.shard_of(bucket.unsharded_gradient).copy_(_shard_gradient(bucket))
        for slot in bucket.slots:
            slot.reduced = slot.used
    expose_gradients(buckets, collectives)


@torch.no_grad()
def _take_back(bucket: ParameterBucket) -> None:
    """Keeps this rank's part of what ``param.grad`` holds now, and frees the rest."""
    for slot in bucket.slots:
        gradient, slot.parameter.grad = slot.parameter.grad, None
        slot.used = gradient is not None
        if slot.shard_slice is None:
            continue
        place = slot.view_into_shard(_shard_gradient(bucket))
        if gradient is None:
            # Another backward of the same step adds to what is there.
            place.zero_()
        else:
            # `param.grad` was rounded to the parameter's dtype: what nobody changed keeps the bits of the wider shard.
            take_where_changed(place, slot.part_of(gradient))
    bucket.unsharded_gradient = None
    bucket.attach_gradients()


def _unsharded_gradient(bucket: GradientBucket) -> torch.Tensor:
    if bucket.unsharded_gradient is None:
        raise AssertionError(f"bucket {bucket.index} has no buffer to expose its gradient in")
    return bucket.unsharded_gradient


def _shard_gradient(bucket: ParameterBucket) -> torch.Tensor:
    if bucket.shard_gradient is None:
        raise AssertionError(f"bucket {bucket.index} has no reduced gradient")
    return bucket.shard_gradient
