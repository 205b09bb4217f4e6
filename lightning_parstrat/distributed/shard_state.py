"""An optimizer's state, kept by shard, to those who ask for it by parameter."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from lightning_parstrat.distributed.slots import ParameterSlot

State = dict[str, Any]


class OwnPart(NamedTuple):
    """This rank's part of an entry that was not there as a whole, 1-D in storage order."""

    elements: Tensor


class StateByShard(defaultdict[Any, Any]):
    """What ``optimizer.state`` is while the optimizer is sharded: keyed by this rank's shards.

    A parameter may be used as a key, too, to read, change, reset or remove the state that this rank has for it: what
    elsewhere has the parameter's shape is the shard's part of it here. Where this rank owns nothing of a parameter,
    there is no state for it. Not collective.

    Args:
        slots: Which shard stands for which parameter; what is added to it later is seen.
        state: By shard.
    """

    def __init__(self, slots: Mapping[Tensor, ParameterSlot], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._slots = slots

    def _key(self, key: Any) -> Any:
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        return key if slot is None or slot.shard is None else slot.shard

    @override
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._key(key))

    @override
    def __missing__(self, key: Any) -> Any:
        # A state that is made for a parameter of which nothing is owned here must not stay.
        return {} if key in self._slots else super().__missing__(key)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        if slot is None:
            super().__setitem__(key, value)
        elif slot.shard is not None:
            super().__setitem__(slot.shard, {name: shard_value(entry, slot) for name, entry in value.items()})

    @override
    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._key(key))

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._key(key), *default)


def shard_existing_state(state: Mapping[Any, Any], slots: Mapping[Tensor, ParameterSlot]) -> StateByShard:
    """This rank's shards of whole state that is there before its parameter is sharded (Adagrad makes it at once)."""
    if isinstance(state, StateByShard) and not any(key in slots for key in state):
        return state
    sharded = StateByShard(slots, {})
    for key, entries in state.items():
        sharded[key] = entries
    return sharded


def shard_value(value: Any, slot: ParameterSlot) -> Any:
    """This rank's part of one entry of a parameter's state; what has not the parameter's shape is kept whole."""
    if isinstance(value, OwnPart) and slot.shard is not None:
        part = value.elements.as_strided(slot.shard.shape, slot.shard.stride())
    elif not isinstance(value, Tensor) or slot.shard is None or value.shape != slot.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    else:
        # A copy, so that what is not this rank's goes: a checkpoint may be mapped into memory, not read.
        part = slot.part_of(value).clone()
    # State that an optimizer made in the parameter's own dtype goes on in the master weights'.
    return part.to(slot.bucket.shard_dtype) if part.dtype == slot.parameter.dtype else part
