"""Which elements of a parameter in a bucket each rank keeps the state of, for checkpoints that all ranks write."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import in_storage_order
from lightning_parstrat.distributed.zero1.buckets import ParameterSlot
from lightning_parstrat.distributed.zero1.state import MASTER_WEIGHTS


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
        """The elements of its state that this rank keeps; None where it keeps none."""
        return None if self._slot.shard_slice is None else self._slot.shard_slice.elements

    def of_parameter(self, elements: slice) -> Tensor:
        """Elements of the parameter, 1-D."""
        return self._slot.storage_order(self._slot.parameter.detach())[elements]

    def of_state(self, optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        """Elements of an entry of its state that this rank keeps, 1-D; None where it has no such entry."""
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


def cuts_in_buckets(slots: Mapping[Tensor, ParameterSlot]) -> dict[Tensor, CutInBucket]:
    """How parameters are cut that lie in buckets."""
    return {parameter: CutInBucket(slot) for parameter, slot in slots.items()}


def _length(elements: slice) -> int:
    length: int = elements.stop - elements.start
    return length
