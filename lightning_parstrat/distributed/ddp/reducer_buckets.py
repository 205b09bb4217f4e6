"""The buckets of a live DistributedDataParallel: exchanges its reducer for one with others."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

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
    """Exchanges the reducer of ``ddp`` for one with other buckets. Not collective.

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
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self._sizes())

    @property
    def default_first(self) -> int:
        """Bytes at which the default's first bucket is full."""
        return self._default.first

    def _sizes(self) -> list[int]:
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

    def filled_from_the_first(self, caps: Caps) -> Caps:
        """Caps that give, filled from the other end, the buckets that ``caps`` give from this one."""
        first, sparse = list(reversed(self.parameters)), list(reversed(self._expect_sparse))
        buckets = assign_to_buckets(first, caps, sparse)
        nbytes = list(reversed(self._sizes()))
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
