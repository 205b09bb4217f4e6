"""If a callback or hook reads or changes reduced gradients in ``param.grad``, they are gathered again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import marked
from lightning_parstrat.distributed.engine.buckets import GradientBucket, ParameterBucket, take_where_changed


def expose_gradients(buckets: Sequence[GradientBucket], collectives: Collectives) -> None:
    """Gathers the reduced gradients of buckets and makes ``param.grad`` views of them.

    Collective: one all-gather per bucket. Parameters without a gradient on any rank keep what they have. This rank's
    shard is a part of the gathered buffer. So changes to ``param.grad`` in place are stepped.

    Args:
        buckets: The buckets reduced in this backward, in the same order on all ranks.
        collectives: The reducer's collectives.
    """
    gathers = []
    for bucket in buckets:
        gradient = cast(Tensor, bucket.unsharded_gradient)
        with marked(f"zero1_custom: all-gather gradients of bucket {bucket.index}"):
            work = collectives.all_gather(gradient, bucket.layout.bounds)
        gathers.append((bucket, gradient, work))
    for bucket, gradient, work in gathers:
        with marked(f"zero1_custom: wait for all-gathered gradients of bucket {bucket.index}"):
            collectives.wait(work)
        for slot in bucket.slots:
            # A parameter that no rank used keeps None as its gradient. It neither decays nor moves by its momentum.
            if slot.reduced:
                # Detached, so that programs may change it by parameters without `torch.no_grad()`, as under DDP.
                slot.parameter.grad = slot.view_into(gradient).detach()
        if bucket.is_replicated:
            # From here on, only `param.grad` holds the gradient. Zeroing `param.grad` frees it.
            bucket.shard_gradient = bucket.unsharded_gradient = None


@contextmanager
def full_gradients(buckets: Sequence[ParameterBucket], collectives: Collectives) -> Iterator[None]:
    """Within it, ``param.grad`` holds the mean gradients. Changes to it are stepped afterwards.

    Collective: one all-gather per bucket that has gradients. It needs memory for all gradients while it lasts.

    Args:
        buckets: The buckets to show, after the reductions have finished.
        collectives: The reducer's collectives.
    """
    shown = [(bucket, gradient) for bucket in buckets if (gradient := bucket.shard_gradient) is not None]
    for bucket, gradient in shown:
        bucket.unsharded_gradient = torch.empty_like(bucket.flat)
        bucket.shard_of(bucket.unsharded_gradient).copy_(gradient)
        for slot in bucket.slots:
            slot.reduced = slot.used
    expose_gradients([bucket for bucket, _ in shown], collectives)
    try:
        yield
    finally:
        for bucket, gradient in shown:
            _take_back(bucket, gradient)


@torch.no_grad()
def _take_back(bucket: ParameterBucket, shard_gradient: Tensor) -> None:
    """Keeps this rank's part of the present ``param.grad``, and frees the rest."""
    for slot in bucket.slots:
        gradient, slot.parameter.grad = slot.parameter.grad, None
        slot.used = gradient is not None
        if slot.shard is None:
            continue
        place = slot.view_into_shard(shard_gradient)
        if gradient is None:
            # Another backward of the same step adds to the shard.
            place.zero_()
        else:
            # `param.grad` was rounded to the parameter's dtype. Unchanged elements keep the bits of the wider shard.
            take_where_changed(place, slot.part_of(gradient))
    bucket.unsharded_gradient = None
    bucket.attach_gradients()
