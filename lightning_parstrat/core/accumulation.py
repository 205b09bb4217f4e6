"""Which micro-batches an optimizer step is made of, and the scale that makes the sum of their gradients a mean.

Lightning divides every loss by ``accumulate`` (K). So the reduction receives a sum over ranks and micro-batches, of
gradients of ``loss / K``. The scales here turn that sum into the gradient of one big batch. The reduction multiplies by
a scale anyway, so a short window costs nothing extra.
"""

import math
from typing import Literal

PartialWindow = Literal["exact", "lightning"]


class AccumulationWindow:
    """Counts the micro-batches since gradients were last zeroed.

    Lightning zeroes gradients at every batch of the epoch whose index is a multiple of K. A window is shorter than K at
    the end of an epoch. It is also shorter after a resume inside an epoch: checkpoints do not hold accumulated
    gradients.
    """

    def __init__(self) -> None:
        self.micro_batches = 0
        # Infinity: the first index begins a run, whatever it is. A resume may start inside an epoch.
        self._last: float = math.inf
        self._first_of_run = 0

    def begin_batch(self, batch_idx: int, accumulate: int) -> bool:
        """Counts a batch. All ranks get the same count, even if one of them has no data for this batch.

        Args:
            batch_idx: Its index in the epoch, from 0.
            accumulate: K, the number of batches in a full window.

        Returns:
            Whether a window begins with it.
        """
        if batch_idx <= self._last:
            # The first batch of an epoch, or of what is left of it after resuming.
            self._first_of_run = batch_idx
        begin = max(batch_idx - batch_idx % accumulate, self._first_of_run)
        # Not `batch_idx == begin`: Lightning skips a batch that is None, also the first of a window.
        begins = not begin <= self._last < batch_idx
        self._last = batch_idx
        self.micro_batches = batch_idx - begin + 1
        return begins


def gradient_scale(*, accumulate: int, micro_batches: int, total: float, partial_window: PartialWindow) -> float:
    """The factor for the sum, over ranks and micro-batches, of the gradients of ``loss * weight / accumulate``.

    Args:
        accumulate: K, how many micro-batches a full window has.
        micro_batches: k, how many this window has on each rank.
        total: The sum of all weights of all micro-batches on all ranks, at least 0. Without weights, each counts 1.
        partial_window: ``"exact"`` gives the mean over the k micro-batches. ``"lightning"`` makes the step of a short
            window smaller by k / K, as stock Lightning does.

    Returns:
        K / total, which without weights is exactly 1 / N for a full window on N ranks. With ``"lightning"``, k / total.
    """
    # A batch may be all padding. Its gradients are 0, and 0 / 0 would make them NaN. A window without a batch is no
    # such case: it ends with an error.
    if total == 0 and micro_batches > 0:
        return 0.0
    counted = micro_batches if partial_window == "lightning" else accumulate
    return counted / total


def reference_weight(mean_weight: float) -> float:
    """The power of two nearest to the mean weight.

    Weights are divided by this power before they multiply a loss. Raw token counts would overflow 16 bits, and would
    need a separate loss scale. Dividing by a power of two is exact. Results change only by overflow or underflow.

    Args:
        mean_weight: Positive and finite.
    """
    fraction, exponent = math.frexp(mean_weight)
    # Only the fraction decides. If all weights double, the reference must double, and nothing else may change.
    # 1023 is the largest exponent of a float. Rounding up beyond it would raise.
    return math.ldexp(1.0, min(exponent if fraction >= math.sqrt(0.5) else exponent - 1, 1023))
