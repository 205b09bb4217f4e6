"""Gradients leave while backward runs: ready hooks, launches in a fixed order, and a flush at the end of backward.

Every rank reduce-scatters the same buckets in the same order, whatever order its gradients arrive in. A bucket leaves
as soon as all gradients it expects have arrived and its predecessors have left. What autograd has not delivered by the
end of backward is settled by one small all-reduce of flags: buckets that no rank touched are not sent, and a gradient
that came after its bucket had left (or unexpectedly) makes all ranks send that bucket once more and add the result.

Two rounds, both in index order, keep the ranks in step:

1. the buckets that expect gradients (a set all ranks agree on), during backward and, where some are missing, after it;
2. the buckets in which any rank has gradients left over.

Where someone reads or changes gradients (``exposes_gradients``), and for parameters that every rank steps, the shards
are gathered again at the end of backward and ``param.grad`` is what DDP would show; else it is None after the flush.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.distributed.comm.collectives import Collectives, Work
from lightning_parstrat.distributed.torch_compat import call_after_backward, current_graph_task_id, last_gradient_hook
from lightning_parstrat.distributed.zero1.clocks import ReadyClock
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ParameterSlot
from lightning_parstrat.distributed.zero1.reductions import GradientScale, Launch, Reductions, expose_gradients

IDLE_BACKWARDS_BEFORE_NOT_AWAITED = 3
"""A trainable parameter that stays without a gradient this often is not waited for; its gradient is still reduced.
More than one, because the optimizers of a GAN take turns."""


class _Agreement(NamedTuple):
    """Flags of all ranks under way, combined by maximum: gradients per parameter, leftovers per bucket, expectation."""

    flags: Tensor
    work: Work


class GradientReducer:
    """Reduces the gradients of bucketed parameters to the shards of their owners.

    Collective: all ranks must run the same sequence of synchronised backwards and of :meth:`finish` calls. A backward
    costs one reduce-scatter per touched bucket and one all-reduce of 4 bytes per parameter and bucket.

    Args:
        collectives: Carry the gradients.
        control: Carries the flags; its group works on host memory.
        max_inflight: How many buckets may be in flight before backward waits. With such a bound every rank sends
            all buckets that are expected, also those of which no rank turns out to have a gradient.
    """

    def __init__(self, collectives: Collectives, control: Collectives, max_inflight: int | None = None) -> None:
        self.collectives = collectives
        self.control = control
        self.buckets: list[GradientBucket] = []
        self._slots: list[ParameterSlot] = []
        self._hooks: dict[ParameterSlot, RemovableHandle] = {}
        self._loss_hook: RemovableHandle | None = None
        self.exposes_gradients = False
        self.collects_unannounced = False
        self._settles_in_backward = False
        self._synchronize = True
        self._running = False
        self._graph_task: int | None = None
        self._queue: list[GradientBucket] = []
        self._launched = 0
        self._missing: dict[GradientBucket, int] = {}
        self._sent: set[GradientBucket] = set()
        self._reductions = Reductions(max_inflight)
        self._backward = 0
        self._agreement: _Agreement | None = None
        self.clock: ReadyClock | None = None
        self._scale: GradientScale = self._mean_over_ranks

    def add_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Takes charge of further buckets; call it outside of backward, on all ranks alike."""
        self._settle()
        self.buckets += buckets
        for bucket in buckets:
            for slot in bucket.slots:
                # What was accumulated before it was in this bucket is as good as new.
                slot.fresh = slot.parameter.grad is not None
                self._slots.append(slot)
                self._register_hook(slot)

    def complete(self) -> None:
        """Waits for the reductions of backwards that nobody has stepped yet. Collective."""
        self._settle()
        self._abandon_unfinished_backward()
        self._reductions.complete(self.buckets, self.collectives)

    def replace_buckets(self, old: Sequence[GradientBucket], new: Sequence[GradientBucket]) -> None:
        """Puts buckets of the same parameters in the place of others, before all that stay; outside of backward."""
        known = {slot.parameter: slot for bucket in old for slot in bucket.slots}
        self.dissolve_buckets(old)
        stay, self.buckets = self.buckets, []
        self.add_buckets(new)
        self.buckets += stay
        for bucket in new:
            for slot in bucket.slots:
                slot.take_over(known[slot.parameter])

    def dissolve_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Lets go of buckets whose parameters get others; call it outside of backward, on all ranks alike.

        A reduced gradient that is shown in ``param.grad`` stays there, and so finds its way into the new bucket.
        """
        self._settle()
        self.buckets = [bucket for bucket in self.buckets if bucket not in buckets]
        self._slots = [slot for slot in self._slots if slot.bucket not in buckets]
        for bucket in buckets:
            for slot in bucket.slots:
                self._hooks.pop(slot).remove()

    def remove(self, failed: bool) -> None:
        """Removes all hooks and forgets what is under way. Not collective: it may follow an exception on one rank.

        Args:
            failed: Whether an exception ends the training, so that other ranks may not be there any more.
        """
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._remove_loss_hook()
        if not failed and not self._running:
            # A backward that nobody stepped: all ranks have launched all of it.
            self._settle()
            self._reductions.complete(self.buckets, self.collectives)
        self._reductions.set_aside()
        self._agreement = None
        self._running = False

    @property
    def synchronize(self) -> bool:
        """Whether a backward that began now would send gradients."""
        return self._synchronize

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates local gradients in ``param.grad`` and sends nothing."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def prepare_backward(self, loss: Tensor, scale: GradientScale | None = None) -> None:
        """Announces the backward of ``loss``; after an exception in the last one, this starts afresh.

        The flush is queued from a hook on the loss: queued from a parameter's hook, it would belong to the inner graph
        task of a reentrant activation checkpoint, and run too early.

        Args:
            loss: What backward is called on.
            scale: What the sum of gradients over ranks is multiplied by; by default 1 over their number.
        """
        self._settle()
        self._remove_loss_hook()
        self._abandon_unfinished_backward()
        if not self._synchronize:
            return
        # Several may be stepped as one: they are added up as they come, not held one by one.
        self._reductions.complete(self.buckets, self.collectives)
        self._let_users_hooks_run_first()
        self._scale = scale or self._mean_over_ranks
        self._begin()
        if loss.requires_grad:
            self._loss_hook = loss.register_hook(self._on_loss_gradient)  # type: ignore[no-untyped-call]

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Waits for the reductions and leaves the mean gradients in the shards of ``buckets``.

        Collective. Called again before the next backward, it takes over what was written into exposed gradients.
        """
        self._settle()
        self._abandon_unfinished_backward()
        if self.collects_unannounced:
            self.reduce_left_over(buckets)
        self._reductions.complete(self.buckets, self.collectives)
        if self.exposes_gradients:
            for bucket in buckets:
                bucket.attach_exposed_gradients()

    def reduce_left_over(self, buckets: Sequence[GradientBucket], scale: GradientScale | None = None) -> None:
        """Sends gradients that are in ``param.grad`` and were not reduced by any announced backward. Collective.

        One small all-reduce, and a reduce-scatter for each of ``buckets`` in which any rank has some.

        Args:
            buckets: Those to look into.
            scale: See :meth:`prepare_backward`.
        """
        self._settle()
        self._sent.clear()
        self._scale = scale or self._mean_over_ranks
        for slot in self._slots:
            slot.arrived = slot.trainable = slot.expected = False
        self._agree_on_leftovers(buckets)
        self._settle()

    def zero(self, slots: Collection[ParameterSlot], set_to_none: bool = True) -> None:
        """Forgets the reduced gradients of ``slots``; reductions still under way are waited for first."""
        self.complete()
        for bucket in dict.fromkeys(slot.bucket for slot in slots):
            bucket.zero_gradients(slots, set_to_none)

    def _begin(self) -> None:
        """Fixes which gradients this backward waits for. All ranks come to the same answer."""
        self._running = True
        self._graph_task = None
        self._queue = []
        self._launched = 0
        self._backward += 1
        self._missing.clear()
        self._sent.clear()
        for bucket in self.buckets:
            expected = 0
            for slot in bucket.slots:
                slot.arrived = False
                awaited = slot.idle_backwards < IDLE_BACKWARDS_BEFORE_NOT_AWAITED
                slot.trainable = slot.parameter.requires_grad
                slot.expected = awaited and slot.trainable
                expected += slot.expected
            if expected:
                self._queue.append(bucket)
                self._missing[bucket] = expected
        # Whether this backward waits for the flags must not depend on what this rank finds in it.
        self._settles_in_backward = self.exposes_gradients or any(
            slot.parameter.requires_grad for bucket in self.buckets if bucket.is_replicated for slot in bucket.slots
        )

    def _on_loss_gradient(self, _: Tensor) -> None:
        self._enter_backward()

    def _enter_backward(self) -> None:
        self._graph_task = current_graph_task_id()
        call_after_backward(self._flush)

    def _on_gradient_ready(self, slot: ParameterSlot, _: Tensor) -> None:
        """Runs in backward, after a gradient has been accumulated in ``param.grad``."""
        slot.fresh = True
        if self.clock is not None:
            self.clock.note(slot.parameter)
        if not self._running:
            # Nobody announced this backward: the user called `loss.backward()`, who knows on which ranks how often.
            return
        if self._graph_task is None:
            self._enter_backward()
        if not slot.expected or current_graph_task_id() != self._graph_task:
            # Within a reentrant checkpoint this may be a part of the gradient: it waits for the flush.
            return
        self._missing[slot.bucket] -= 1
        if self._missing[slot.bucket] == 0:
            self._launch_complete_buckets()

    def _launch_complete_buckets(self) -> None:
        while self._launched < len(self._queue) and self._missing[self._queue[self._launched]] <= 0:
            self._launched += 1
            self._launch(self._queue[self._launched - 1])

    def _launch(self, bucket: GradientBucket) -> None:
        how = Launch(self._exposes(bucket), bucket in self._sent, self._scale, self._backward)
        self._sent.add(bucket)
        self._reductions.launch(bucket, how, self.collectives)

    def _mean_over_ranks(self) -> float:
        return 1.0 / self.collectives.world_size

    def _exposes(self, bucket: GradientBucket) -> bool:
        return self.exposes_gradients or bucket.is_replicated

    def _flush(self) -> None:
        """Runs when backward has ended: tells the other ranks what came, and sends what is complete by agreement."""
        self._running = False
        self._remove_loss_hook()
        if self._reductions.max_inflight is not None:
            # Other ranks may be waiting in backward for what is not complete here.
            self._missing = dict.fromkeys(self._missing, 0)
            self._launch_complete_buckets()
        self._agree_on_leftovers(self.buckets)
        if self._launched < len(self._queue) or self._settles_in_backward:
            self._settle()

    def _agree_on_leftovers(self, buckets: Sequence[GradientBucket]) -> None:
        """Tells the other ranks for which parameters there were gradients, and which buckets have some left over."""
        waiting = set(self._queue[self._launched :])
        looked_into = set(buckets)
        left = [slot.bucket in looked_into and self._has_gradient(slot) for slot in self._slots]
        arrived = [slot.arrived or has for slot, has in zip(self._slots, left, strict=True)]
        with_left = {slot.bucket for slot, has in zip(self._slots, left, strict=True) if has}
        left_over = [bucket in with_left and bucket not in waiting for bucket in self.buckets]
        expectation = zlib.crc32(bytes(slot.expected for slot in self._slots)) >> 2
        flags = torch.tensor([*arrived, *left_over, expectation, -expectation], dtype=torch.int32)
        self._agreement = _Agreement(flags, self.control.all_reduce(flags, op=dist.ReduceOp.MAX))

    def _settle(self) -> None:
        """Ends the round: sends what any rank has gradients for, and learns which parameters were used at all."""
        if self._agreement is None:
            return
        agreement, self._agreement = self._agreement, None
        agreement.work.wait()
        flags: list[int] = agreement.flags.tolist()
        if flags[-2] != -flags[-1]:
            raise RuntimeError(
                "The ranks disagree about which parameters are trainable: `requires_grad` must be set alike on all"
                " ranks when backward begins."
            )
        for slot, used in zip(self._slots, flags, strict=False):
            slot.reduced = bool(used)
            slot.used = slot.used or slot.reduced
            if slot.trainable:
                slot.idle_backwards = 0 if used else slot.idle_backwards + 1
        for bucket in self._queue[self._launched :]:
            if any(slot.reduced for slot in bucket.slots):
                self._launch(bucket)
        self._launched = len(self._queue)
        left_over = flags[len(self._slots) : -2]
        for bucket, needed in zip(self.buckets, left_over, strict=True):
            if needed:
                self._launch(bucket)
        exposed = [bucket for bucket in self.buckets if bucket in self._sent and self._exposes(bucket)]
        self._reductions.complete(exposed, self.collectives)
        expose_gradients(exposed, self.collectives)

    def _has_gradient(self, slot: ParameterSlot) -> bool:
        return slot.fresh and slot.parameter.grad is not None

    def _abandon_unfinished_backward(self) -> None:
        """Sets aside what a backward that raised had launched; its memory must outlive the transfers."""
        if self._running:
            self._running = False
            self._queue, self._launched = [], 0
            self._reductions.set_aside(self._backward)

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
        for slot, hook in self._hooks.items():
            if last_gradient_hook(slot.parameter) not in (None, hook.id):
                hook.remove()
                self._register_hook(slot)
