"""The buckets of a live DistributedDataParallel: predicts those that caps lead to, and exchanges the reducer."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.core.tuning import Caps
from lightning_parstrat.distributed.ddp.ddp_compat import (
    BucketCaps,
    assign_to_buckets,
    bucket_caps,
    exchange_reducer,
    names_for_reducer,
    parameters_for_reducer,
    sends_by_compiled_code,
)


@contextmanager
def trainable(parameters: Collection[Tensor], others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within it ``parameters`` require gradients, and those of ``others`` that are not among them do not."""
    chosen = set(parameters)
    before = [(one, one.requires_grad) for one in {*chosen, *others}]
    try:
        for one, required in before:
            if required != (one in chosen):
                one.requires_grad_(one in chosen)
        yield
    finally:
        for one, required in before:
            if one.requires_grad != required:
                one.requires_grad_(required)


class DDPBuckets:
    """Exchanges the reducer of ``ddp`` for one with other buckets, and predicts these. Not collective.

    torch assigns parameters to buckets by caps: a bucket is full when its size reaches its cap. Usually this is done
    again after the first backward, in the order in which gradients became ready. Where backward looks for unused
    parameters (and the graph is not static) it is not: buckets stay in the reverse order of registration, and are
    filled from the other end.

    Args:
        ddp: Its buckets are the default; its reducer sends all parameters that require gradients now.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.parameters: list[Tensor]
        self.parameters, self._expect_sparse = parameters_for_reducer(ddp)
        self._default = bucket_caps(ddp)
        # Only now: torch raises if parameters have been unfrozen or added since.
        self._names = names_for_reducer(ddp, self.parameters)
        self.are_default = True
        self._rebuilds = ddp.static_graph or not ddp.find_unused_parameters

    @property
    def dtype(self) -> torch.dtype:
        """The dtype with the most bytes."""
        return self.parameters[self.order([0.0] * len(self.parameters))[0]].dtype

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each parameter's gradient."""
        return [parameter.numel() * parameter.element_size() for parameter in self.parameters]

    def reason_not_to_change(self) -> str | None:
        """Why buckets cannot be changed; None where they can."""
        if sends_by_compiled_code(self._ddp):
            return "torch.compile sends gradients by itself"
        if any(self._expect_sparse):
            return "there are sparse gradients, which travel by themselves"
        if getattr(self._ddp, "mixed_precision", None) is not None:
            return "DDP's own mixed precision sends gradients in another dtype"
        if len(self.parameters) < 2:
            return "there are fewer than two parameters"
        return None

    def order(self, ready_seconds: Sequence[float]) -> list[int]:
        """The parameters of the dtype and device that has most bytes, in the order in which buckets are filled."""
        nbytes = Counter[tuple[Any, ...]]()
        for parameter, size in zip(self.parameters, self.nbytes, strict=True):
            nbytes[_key(parameter)] += size
        chosen = max(nbytes, key=lambda key: nbytes[key])
        return [index for index in self._all_in_order(ready_seconds) if _key(self.parameters[index]) == chosen]

    def assigned(self, caps: Caps | None, ready_seconds: Sequence[float]) -> list[list[int]]:
        """The parameters of each bucket, in the order in which they are sent; None for the default's caps."""
        default = self._default
        limits = list((default.single or (default.first, default.others)) if caps is None else caps)
        if self._rebuilds:
            order = self._all_in_order(ready_seconds)
            in_order, sparse = [self.parameters[index] for index in order], [False] * len(order)
            # torch's own function: a prediction that differed from what the reducer does would be worth nothing.
            return assign_to_buckets(in_order, limits, sparse, order)
        if caps is not None:
            # Here torch fills buckets from the end that is sent last.
            limits.reverse()
        buckets = assign_to_buckets(self.parameters, limits, self._expect_sparse)
        return [list(reversed(bucket)) for bucket in reversed(buckets)]

    def filled_from_the_first(self, caps: Caps) -> Caps:
        """Caps that give, filled from the other end, the buckets that ``caps`` give from this one."""
        first, sparse = list(reversed(self.parameters)), list(reversed(self._expect_sparse))
        buckets = assign_to_buckets(first, caps, sparse)
        nbytes = list(reversed(self.nbytes))
        return tuple(sum(nbytes[index] for index in bucket) for bucket in buckets)

    def adopt(self, caps: Caps | None) -> None:
        """Gives the wrapper a reducer with these caps, or with the default's. All ranks must call it, between steps.

        Gradients keep the memory of the old buckets until the next backward has moved them. Where it raises, nothing
        has changed.
        """
        before = dict(vars(self._ddp))
        try:
            # Some may be frozen by now, and be sent all the same.
            with trainable(self.parameters):
                exchange_reducer(self._ddp, self.parameters, self._expect_sparse, self._names, self._given_caps(caps))
        # torch builds the new reducer in several steps: a wrapper left between two of them could not train on.
        except BaseException:
            vars(self._ddp).update(before)
            raise
        self.are_default = caps is None

    def _given_caps(self, caps: Caps | None) -> BucketCaps:
        if caps is None:
            return self._default
        largest = max(caps)
        return BucketCaps(largest, largest, tuple(caps if self._rebuilds else reversed(caps)))

    def _all_in_order(self, ready_seconds: Sequence[float]) -> list[int]:
        positions = range(len(self.parameters))
        if self._rebuilds:
            with_gradient = [index for index in reversed(positions) if ready_seconds[index] > 0]
            # A static graph appends parameters without a gradient.
            without = [index for index in positions if not ready_seconds[index] > 0]
            return sorted(with_gradient, key=lambda index: ready_seconds[index]) + without
        return list(reversed(positions))


def _key(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device
