"""World size 1: a gradient is its own mean, and becomes its shard's as autograd made it.

So one rank needs no memory and no pass over gradients that a training on a single device does not need. Where gradients
are shown, or stepped in another dtype than they have, they are packed as everywhere, but copied no second time.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.distributed.torch_compat import multiply_all
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket
from lightning_parstrat.distributed.zero1.parameter_bucket import OwnGradient, ParameterBucket
from lightning_parstrat.distributed.zero1.reductions import GradientScale, Launch, Reductions


class _Taken(NamedTuple):
    """Gradients of a bucket that are still to be made a mean of micro-batches."""

    bucket: ParameterBucket
    gradients: list[OwnGradient]
    backward: object
    scale: GradientScale


class LocalReductions(Reductions):
    """Of collectives that send nothing. Arguments are those of :class:`Reductions`. Not collective."""

    _taken: tuple[_Taken, ...] = ()

    @override
    def launch(self, bucket: GradientBucket, how: Launch) -> None:
        """Takes the gradients of ``bucket``, where they can be stepped as they are."""
        if (
            how.exposes
            or how.scale is None
            or not isinstance(bucket, ParameterBucket)
            or not bucket.steps_gradients_as_they_are
        ):
            super().launch(bucket, how)
        else:
            if self.arrivals is not None:
                # They are touched when backward has ended, after all of its streams.
                self.arrivals.forget(bucket)
            self._taken = (*self._taken, _Taken(bucket, bucket.take_gradients(), how.backward, how.scale))

    @override
    def _room(self, bucket: GradientBucket, buffer: Tensor, exposes: bool) -> tuple[Tensor, Tensor | None]:
        if buffer.dtype != (bucket.dtype if exposes else bucket.shard_dtype):
            return super()._room(bucket, buffer, exposes)
        # What was packed is all of the sum.
        return bucket.shard_of(buffer), buffer if exposes else None

    @override
    def complete(self, buckets: Collection[GradientBucket] | None = None) -> None:
        """Leaves the mean gradients in the shards."""
        super().complete(buckets)
        if buckets is not None:
            # Those are shown ones, which are never taken.
            return
        taken, self._taken = self._taken, ()
        for bucket, gradients, _, scale_of_window in _made_independent(taken):
            with torch.no_grad():
                scale = scale_of_window()
                if scale != 1.0 and gradients:
                    multiply_all([gradient for _, gradient in gradients], scale)
                bucket.add_own_gradients(gradients)

    @override
    def set_aside(self, backward: object | None = None) -> None:
        """Forgets those of one backward, or all."""
        super().set_aside(backward)
        self._taken = tuple(one for one in self._taken if backward not in (None, one.backward))


@torch.no_grad()
def _made_independent(taken: Sequence[_Taken]) -> list[_Taken]:
    """The same gradients, of which each can be changed alone, and has its numbers in memory as they are.

    Autograd leaves two parameters the same memory where an operator gives several inputs one gradient, and a lazily
    conjugated or negated gradient where parameters are complex.
    """
    storages: set[int] = set()
    independent = []
    for one in taken:
        gradients = []
        for shard, gradient in one.gradients:
            own = gradient.resolve_conj().resolve_neg()
            if own.untyped_storage().data_ptr() in storages:
                own = own.clone()
            storages.add(own.untyped_storage().data_ptr())
            gradients.append(OwnGradient(shard, own))
        independent.append(one._replace(gradients=gradients))
    return independent
