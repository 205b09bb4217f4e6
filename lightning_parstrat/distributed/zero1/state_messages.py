"""Brings an optimizer's sharded state to one rank: a packed message of each rank and bucket, several at a time."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import Work, as_work
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS, ToldState

_BYTES_IN_FLIGHT = 2**24
"""What the destination has room for beside the state, unless one message is larger."""

_IN_FLIGHT = 16
"""How many messages the destination is ready for."""

_ALIGNMENT = 16
"""Bytes: of the widest dtype."""


class _Place(NamedTuple):
    """Where a part of a tensor lies in a message, in bytes."""

    slot: ParameterSlot
    elements: slice
    key: str
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, message: Tensor) -> Tensor:
        return message[self.start : self.stop].view(self.dtype)


class UnshardedState:
    """Tensors of an optimizer's state, in host memory, as they fill with what ranks hold.

    Args:
        told: What there is.
    """

    def __init__(self, told: Sequence[ToldState]) -> None:
        self.by_slot: dict[ParameterSlot, dict[str, Any]] = {
            slot: {key: one.value if one.dtype is None else _room(slot, one.dtype) for key, one in entries.items()}
            for state in told
            for slot, entries in state.by_slot().items()
        }

    def put(self, place: _Place, part: Tensor) -> None:
        """Takes over a part."""
        tensor = self.by_slot[place.slot][place.key]
        place.slot.storage_order(tensor)[place.elements].copy_(part)

    def take_in(self, work: Work, message: Tensor, places: Sequence[_Place]) -> int:
        """Waits for a message and takes over what is in it; returns its bytes."""
        work.wait()
        for place in places:
            self.put(place, place.view(message))
        return message.nbytes


def collect(
    optimizer: Optimizer, told: Sequence[ToldState], ranks: Sequence[int], control: Collectives, destination: int
) -> dict[ParameterSlot, dict[str, Any]]:
    """The unsharded state on the destination; nothing elsewhere. Collective.

    Each of ``ranks`` sends one message a bucket, packed in host memory. The destination receives several at a time:
    beside the state its host holds 16 MiB of them, or one.

    Args:
        optimizer: Its state is collected.
        told: What there is, of each bucket.
        ranks: The ranks that together hold one copy, in the order of their shards.
        control: Of all ranks; works on host memory.
        destination: Who collects.
    """
    if control.rank != destination:
        if control.rank in ranks:
            _send(optimizer, told, ranks.index(control.rank), control.group, destination)
        return {}
    state = UnshardedState(told)
    arriving: deque[tuple[Work, Tensor, list[_Place]]] = deque()
    nbytes = 0
    for of_bucket in told:
        for shard, source in enumerate(ranks):
            places = list(_places(of_bucket, shard))
            if source == destination:
                for place in places:
                    state.put(place, _own_part(optimizer, place))
            elif places:
                while arriving and (nbytes + places[-1].stop > _BYTES_IN_FLIGHT or len(arriving) == _IN_FLIGHT):
                    nbytes -= state.take_in(*arriving.popleft())
                nbytes += places[-1].stop
                # No name is kept for it: it would hold the message while the next has room made for it.
                arriving.append(_receive(places, source, control.group))
    for arrived in arriving:
        state.take_in(*arrived)
    return state.by_slot


def _receive(places: list[_Place], source: int, group: dist.ProcessGroup) -> tuple[Work, Tensor, list[_Place]]:
    message = torch.empty(places[-1].stop, dtype=torch.uint8)
    return as_work(group.recv([message], source, 0)), message, places


def _send(
    optimizer: Optimizer, told: Sequence[ToldState], shard: int, group: dist.ProcessGroup, destination: int
) -> None:
    # The next message is packed while one is on its way.
    sent: tuple[Work, Tensor] | None = None
    for of_bucket in told:
        places = list(_places(of_bucket, shard))
        if places:
            message = torch.empty(places[-1].stop, dtype=torch.uint8)
            for place in places:
                place.view(message).copy_(_own_part(optimizer, place))
            if sent is not None:
                sent[0].wait()
            sent = as_work(group.send([message], destination, 0)), message
    if sent is not None:
        sent[0].wait()


def _places(told: ToldState, shard: int) -> Iterator[_Place]:
    """The parts of tensors in a shard's message, in their order."""
    stop = 0
    for slot, elements, entries in told.parts_of(shard):
        for key, entry in entries.items():
            if entry.dtype is not None:
                start = -(-stop // _ALIGNMENT) * _ALIGNMENT
                stop = start + (elements.stop - elements.start) * entry.dtype.itemsize
                yield _Place(slot, elements, key, entry.dtype, start, stop)


def _own_part(optimizer: Optimizer, place: _Place) -> Tensor:
    """This rank's part of a sharded entry: 1-D in storage order, where it is."""
    slot = place.slot
    if slot.shard is None or slot.shard_slice is None:
        raise AssertionError("state was found for a shard that does not exist")
    value: Tensor = slot.shard if place.key == MASTER_WEIGHTS else optimizer.state[slot.shard][place.key]
    uncut = slot.shard_slice.numel == slot.place.numel
    return slot.storage_order(value.detach()) if uncut else value.detach()


def _room(slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
    # Zeros, as before a first step: a rank may have no such entry where others have.
    return torch.empty_strided(slot.parameter.shape, slot.strides, dtype=dtype).zero_()
