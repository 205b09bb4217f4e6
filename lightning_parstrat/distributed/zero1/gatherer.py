"""Updated parameters are all-gathered: every rank sends the shard it stepped, and receives the others'.

Gathers run on while the next buckets step, the next batch is loaded and the next forward begins; who reads a parameter
waits for its bucket (``read_guard.py``). All have arrived before the next backward.
"""

import threading
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.streams import Streams
from lightning_parstrat.distributed.comm.work import DONE, Work
from lightning_parstrat.distributed.profiling import marked
from lightning_parstrat.distributed.zero1.parameter_bucket import ParameterBucket
from lightning_parstrat.distributed.zero1.read_guard import can_be_marked, mark, unmark


class _Gather(NamedTuple):
    """A bucket in flight; ``stream`` is the one it was launched from.

    ``is_guarded`` says that its parameters may be in flight after the step: who reads one waits for it.
    """

    work: Work
    buffer: Tensor
    is_guarded: bool
    stream: Hashable


class ParameterGatherer:
    """All-gathers flat buckets in place.

    Launching is collective, waiting is not: a rank may wait earlier than others.

    Args:
        collectives: Carry the parameters.
        streams: Those of the parameters' device.
    """

    def __init__(self, collectives: Collectives, streams: Streams) -> None:
        self.collectives = collectives
        self.streams = streams
        self.overlaps = False
        self.steps = 0
        """How many times :meth:`finish_prompt` was called."""
        self._in_flight: dict[ParameterBucket, _Gather] = {}
        # A thread that saves a checkpoint reads parameters, too.
        self._lock = threading.RLock()

    @property
    def is_busy(self) -> bool:
        """Whether any parameters are in flight."""
        return bool(self._in_flight)

    def launch(self, bucket: ParameterBucket) -> None:
        """Sends this rank's shard of ``bucket``, in which some rank has stepped, and begins to receive the others'.

        Collective: all ranks launch the same buckets in the same order. :meth:`finish_prompt` is to follow.

        Args:
            bucket: The bucket.
        """
        # Whoever holds a view of the buffer, or a subclass with its own __torch_function__, escapes the read guard.
        overlaps = self.overlaps and bucket.is_read_through_parameters and can_be_marked(*bucket.parameters)
        buffer = bucket.parameters_to_send()
        with marked(f"zero1_custom: all-gather parameters of bucket {bucket.index}"):
            work = self.collectives.all_gather(buffer, bucket.layout.bounds)
        # What has nothing to send is there at once.
        is_guarded = overlaps and work is not DONE
        with self._lock:
            self._in_flight[bucket] = _Gather(work, buffer, is_guarded, self.streams.current())
        # A graph that saved the old values must not be run backward with the new ones: torch raises on it.
        stepped = [slot.parameter for slot in bucket.slots if slot.used or slot.parameter.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        if is_guarded:
            mark(bucket.parameters, partial(self._arrive, bucket))

    def finish_prompt(self) -> None:
        """Waits for buckets that somebody could read without being noticed."""
        self.steps += 1
        with self._lock:
            prompt = [bucket for bucket, gather in self._in_flight.items() if not gather.is_guarded]
        for bucket in prompt:
            self._arrive(bucket)

    def finish(self) -> None:
        """Waits for all that is in flight. Not collective."""
        for bucket in list(self._in_flight):
            self._arrive(bucket)

    def abandon(self) -> None:
        """Waits as :meth:`finish` does after an exception, when other ranks may not be there any more."""
        try:
            self.finish()
        except RuntimeError:
            for bucket in list(self._in_flight):
                self._in_flight.pop(bucket)
                unmark(bucket.parameters)

    def _arrive(self, bucket: ParameterBucket) -> None:
        with self._lock:
            gather = self._in_flight.get(bucket)
            if gather is None:
                return
            mark_of_wait = marked(f"zero1_custom: wait for parameters of bucket {bucket.index}")
            with mark_of_wait, self.streams.on(gather.stream):
                self.collectives.wait(gather.work)
                bucket.finish_gather(gather.buffer)
                # Last: another thread that finds an ordinary parameter reads it at once.
                del self._in_flight[bucket]
                unmark(bucket.parameters)
            if self.streams.current() != gather.stream:
                # The reader's. The launching one, which reads next in most trainings, has waited for the collective.
                self.streams.wait_for(gather.stream)
