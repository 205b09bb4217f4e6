"""How parameters are cut into the ranks' shards: what a checkpoint has to know of that, whoever has cut them."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import in_storage_order
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS


class Cut(Protocol):
    """How a parameter is cut, and with it the state that lies like it; all in elements in storage order."""

    @property
    def key(self) -> Hashable:
        """The same for all parameters that are cut as one."""

    @property
    def bounds(self) -> Sequence[int]:
        """Shard i of what is cut as one has the elements ``[bounds[i], bounds[i + 1])``."""

    @property
    def offset(self) -> int:
        """Where the parameter begins in that."""

    @property
    def numel(self) -> int:
        """How many elements the parameter has as a whole."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole parameter."""

    @property
    def strides(self) -> Sequence[int]:
        """Those with which the whole parameter's elements lie in storage order."""

    @property
    def own(self) -> slice | None:
        """The elements whose state this rank keeps, maybe none; None where it keeps no state of the parameter."""

    def of_parameter(self, elements: slice) -> Tensor:
        """Elements of the parameter that this rank writes, 1-D."""

    def of_state(self, optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        """Elements of an entry of its state that this rank writes, 1-D; None where it has no such entry."""


class CutInBucket:
    """A parameter in a bucket: every rank has all of it, and the state of its shard.

    Args:
        slot: Its place.
    """

    def __init__(self, slot: ParameterSlot) -> None:
        self._slot = slot
        self.key: Hashable = id(slot.bucket)
        self.bounds: Sequence[int] = slot.bucket.layout.bounds
        self.offset, self.numel = slot.place.offset, slot.place.numel
        self.shape: Sequence[int] = slot.parameter.shape
        self.strides: Sequence[int] = slot.strides

    @property
    def own(self) -> slice | None:
        """See :class:`Cut`."""
        return None if self._slot.shard_slice is None else self._slot.shard_slice.elements

    def of_parameter(self, elements: slice) -> Tensor:
        """See :class:`Cut`."""
        return self._slot.storage_order(self._slot.parameter.detach())[elements]

    def of_state(self, optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        """See :class:`Cut`."""
        shard, own = self._slot.shard, self.own
        if shard is None or own is None:
            raise AssertionError("a part of a state was asked for on a rank that owns nothing of it")
        of_shard: Mapping[str, Any] = (
            {MASTER_WEIGHTS: shard} if entry == MASTER_WEIGHTS else optimizer.state.get(shard, {})
        )
        value: Tensor | None = of_shard.get(entry)
        return (
            None
            if value is None
            else in_storage_order(value.detach())[elements.start - own.start :][: _length(elements)]
        )


def cuts_in_buckets(slots: Mapping[Tensor, ParameterSlot]) -> dict[Tensor, Cut]:
    """How parameters are cut that lie in buckets."""
    return {parameter: CutInBucket(slot) for parameter, slot in slots.items()}


def _length(elements: slice) -> int:
    length: int = elements.stop - elements.start
    return length
