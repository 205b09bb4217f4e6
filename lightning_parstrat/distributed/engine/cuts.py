"""Which elements of a parameter in a bucket each rank keeps the state of, for checkpoints that all ranks write."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.core.tensor_trees import in_storage_order
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS


def cuts_in_buckets(slots: Mapping[Tensor, ParameterSlot]) -> dict[Tensor, Cut]:
    """How parameters in buckets are cut. Every rank has all of each parameter, and the state of its shard."""
    return {parameter: _cut(slot) for parameter, slot in slots.items()}


def _cut(slot: ParameterSlot) -> Cut:
    place, own = slot.place, None if slot.shard_slice is None else slot.shard_slice.elements

    def of_parameter(elements: slice) -> Tensor:
        return slot.storage_order(slot.parameter.detach())[elements]

    def of_state(optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        shard = slot.shard
        if shard is None or own is None:
            raise AssertionError("a part of a state was asked for on a rank that owns nothing of it")
        of_shard: Mapping[str, Any] = optimizer.state.get(shard, {})
        value: Tensor | None = shard if entry == MASTER_WEIGHTS else of_shard.get(entry)
        if value is None:
            return None
        return in_storage_order(value.detach())[elements.start - own.start : elements.stop - own.start]

    bounds = slot.bucket.layout.bounds
    shape = slot.parameter.shape
    return Cut(id(slot.bucket), bounds, place.offset, place.numel, shape, slot.strides, own, of_parameter, of_state)
