"""This rank's part of each micro-batch of all ranks."""

import copy
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_parstrat.core.global_batch import GlobalBatches, cut


class Division:
    """Cuts the micro-batches of an epoch among ranks. Not collective: all ranks cut alike.

    Attributes:
        batches: The samples of steps and micro-batches.
        cuts: The ranks' shares, each with the number of the epoch's micro-batch from which on they hold.
        drawn: The number of the epoch's micro-batches that were drawn.

    Args:
        batches: The samples of steps and micro-batches.
        rank: This rank.
        cuts: The shares.
    """

    def __init__(self, batches: GlobalBatches, rank: int, cuts: list[tuple[int, list[float]]]) -> None:
        self.batches, self.cuts, self.drawn = batches, cuts, 0
        self._rank = rank
        self._samples: dict[int, int] = {}

    def begin(self, batches_before: int) -> None:
        """Call when a pass draws its first micro-batch.

        Args:
            batches_before: The number of its micro-batches that were drawn before a resume.
        """
        if batches_before == 0:
            self.cuts[:] = [(0, self.cuts[-1][1])]
        self.drawn = batches_before
        self._samples.clear()

    def own(self, batch: list[Any]) -> list[Any]:
        """This rank's part of the next micro-batch."""
        shares = next(shares for begin, shares in reversed(self.cuts) if begin <= self.drawn)
        parts = cut(len(batch), shares)
        begin = sum(parts[: self._rank])
        own = batch[begin : begin + parts[self._rank]]
        self._samples[self.drawn] = len(own)
        self.drawn += 1
        # No batch can be empty. This one counts nothing.
        return own or batch[:1]

    def samples(self, number: int) -> int | None:
        """The samples of this rank's part of a micro-batch. Those before it are forgotten."""
        for older in [one for one in self._samples if one < number]:
            del self._samples[older]
        return self._samples.get(number)


def as_rank(sampler: Any, rank: int, ranks: int) -> Any:
    """A copy of a sampler that shares an order with other ranks, as one of these ranks would have it."""
    own = copy.copy(sampler)
    inner = own if isinstance(own, DistributedSampler) else copy.copy(own.sampler)
    samples = len(inner.dataset)
    inner.rank, inner.num_replicas = rank, ranks
    inner.num_samples = samples // ranks if inner.drop_last else -(-samples // ranks)
    inner.total_size = ranks * inner.num_samples
    if inner is not own:
        own.sampler = inner
    return own
