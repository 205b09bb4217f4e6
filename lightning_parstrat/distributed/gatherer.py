"""Updated parameters come home: every rank sends the shard it stepped, and receives the others'."""

from collections.abc import Sequence

import torch

from lightning_parstrat.distributed.buckets import ParameterBucket
from lightning_parstrat.distributed.collectives import Collectives


class ParameterGatherer:
    """All-gathers flat buckets in place.

    Args:
        collectives: Carry the parameters.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def gather(self, buckets: Sequence[ParameterBucket]) -> None:
        """Brings the parameters of ``buckets`` up to date on every rank; returns when they are.

        Collective. One all-gather per bucket, all under way together.

        Args:
            buckets: Those in which any rank stepped its shard, the same on all ranks. Gathered from the last to the
                first: the next forward reads parameters in the reverse order of their gradients.
        """
        under_way = [
            (bucket, self.collectives.all_gather(bucket.flat, bucket.layout.bounds)) for bucket in reversed(buckets)
        ]
        for bucket, work in under_way:
            work.wait()
            bucket.copy_out_to_strangers()
            # A graph that saved the old values must not be run backward with the new ones: torch raises on it.
            stepped = [slot.parameter for slot in bucket.slots if slot.used or slot.parameter.grad is not None]
            torch.autograd.graph.increment_version(stepped)
