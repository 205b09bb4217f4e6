"""Reduced gradients for those who look at them: ``param.grad`` as DDP would show it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_parstrat.distributed.buckets import GradientBucket, ParameterBucket, take_where_changed
from lightning_parstrat.distributed.collectives import Collectives


def expose_gradients(buckets: Sequence[GradientBucket], collectives: Collectives) -> None:
    """Gathers the reduced gradients of whole buckets and makes ``param.grad`` views of them.

    Collective: one all-gather per bucket. Parameters that no rank had a gradient for keep what they have. This rank's
    shard is a part of the gathered buffer, so what is written into ``param.grad`` in place is what steps.

    Args:
        buckets: Those reduced in this backward, in the same order on all ranks.
        collectives: The reducer's.
    """
    under_way = [(bucket, collectives.all_gather(_whole_gradient(bucket), bucket.layout.bounds)) for bucket in buckets]
    for bucket, work in under_way:
        collectives.wait(work)
        for slot in bucket.slots:
            if slot.reduced:
                slot.parameter.grad = slot.view_into(_whole_gradient(bucket))
        if bucket.keeps_parameters_whole:
            # From here on `param.grad` is all that holds it, and zeroing it frees it.
            bucket.shard_gradient = bucket.whole_gradient = None


@contextmanager
def full_gradients(buckets: Sequence[ParameterBucket], collectives: Collectives) -> Iterator[None]:
    """Within it ``param.grad`` holds the mean gradients; what is changed there is what steps afterwards.

    Collective: one all-gather per bucket that has gradients. Needs memory for all gradients while it lasts.

    Args:
        buckets: Those to show, after the reductions have finished.
        collectives: The reducer's.
    """
    shown = [bucket for bucket in buckets if bucket.shard_gradient is not None]
    for bucket in shown:
        bucket.whole_gradient = torch.empty_like(bucket.flat)
        bucket.shard_of(bucket.whole_gradient).copy_(_shard_gradient(bucket))
        for slot in bucket.slots:
            slot.reduced = slot.used
    expose_gradients(shown, collectives)
    try:
        yield
    finally:
        for bucket in shown:
            _take_back(bucket)


@torch.no_grad()
def _take_back(bucket: ParameterBucket) -> None:
    """Keeps this rank's part of what ``param.grad`` holds now, and frees the rest."""
    for slot in bucket.slots:
        gradient, slot.parameter.grad = slot.parameter.grad, None
        slot.used = gradient is not None
        if gradient is not None and slot.piece is not None:
            take_where_changed(slot.view_into_shard(_shard_gradient(bucket)), slot.part_of(gradient))
    bucket.whole_gradient = None
    bucket.attach_gradients()


def _whole_gradient(bucket: GradientBucket) -> torch.Tensor:
    if bucket.whole_gradient is None:
        raise AssertionError(f"bucket {bucket.index} has no buffer to expose its gradient in")
    return bucket.whole_gradient


def _shard_gradient(bucket: ParameterBucket) -> torch.Tensor:
    if bucket.shard_gradient is None:
        raise AssertionError(f"bucket {bucket.index} has no reduced gradient")
    return bucket.shard_gradient
