"""Moves optimizer state and master weights to the ranks that own them under a new plan.

What a rank owns of a parameter under both plans is copied, the rest is sent once from its old owner to its new one: at
most all of the state, (N - 1) / N of it in the mean, bucket by bucket. Ranks tell each other first what there is.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.layout import ShardSlice
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.exchange import exchange_chunks
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot

State = dict[str, Any]


class Move(NamedTuple):
    """A parameter's place under the old and under the new plan."""

    old: ParameterSlot
    new: ParameterSlot

    @property
    def changes_hands(self) -> bool:
        """Whether any of its elements gets another owner."""
        shards = range(self.old.bucket.layout.world_size)
        return any(self.old.elements_of(shard) != self.new.elements_of(shard) for shard in shards)


class _Known(NamedTuple):
    """One entry of a state: the dtype of a tensor that lies like the shard, or (None) any other value, on the host."""

    dtype: torch.dtype | None
    value: Any
    on_device: bool


def move_state(
    optimizer: Optimizer, moves: Sequence[Move], collectives: Collectives, control: Collectives
) -> dict[Tensor, State]:
    """This rank's part of an optimizer's state under the new plan. Collective.

    Args:
        optimizer: Its state is by shards of the old plan.
        moves: The parameters whose state it holds, in the same order on all ranks.
        collectives: Carry the state; nothing is under way.
        control: Tells the others what there is; works on host memory.

    Returns:
        The state by shards of the new plan.
    """
    # By the layouts, which all ranks have: each must send and expect the same.
    changing = [move for move in moves if move.changes_hands]
    states: dict[Tensor, State] = {}
    for move in moves:
        if move.old.shard is not None and move.new.shard is not None and move.old.shard in optimizer.state:
            states[move.new.shard] = optimizer.state[move.old.shard]
    known = _tell_each_other([_describe(optimizer, move) for move in changing], control)
    for move, entries in zip(changing, known, strict=True):
        if not entries:
            continue
        own: State = {} if move.old.shard is None else optimizer.state.get(move.old.shard, {})
        sharded = [key for key, entry in entries.items() if entry.dtype is not None]
        arrived = _move_slices(move, [(own.get(key), entries[key].dtype) for key in sharded], collectives)
        if move.new.shard is None:
            continue
        moved = dict(zip(sharded, arrived, strict=True))
        states[move.new.shard] = {
            key: moved[key] if key in moved else own[key] if key in own else _value(entry, move.new)
            for key, entry in entries.items()
        }
    return states


@torch.no_grad()
def move_master_weights(moves: Sequence[Move], collectives: Collectives) -> None:
    """Brings master weights to their new owners. Collective; nothing is under way."""
    for move in moves:
        if move.new.bucket.has_master_weights:
            (arrived,) = _move_slices(move, [(move.old.shard, move.new.bucket.shard_dtype)], collectives)
            if move.new.shard is not None and arrived is not None:
                move.new.shard.copy_(arrived)


@torch.no_grad()
def move_gradients(moves: Sequence[Move], collectives: Collectives) -> None:
    """Brings the reduced gradients that nobody has zeroed yet to their new owners. Collective."""
    for move in moves:
        if not move.old.used:
            continue
        bucket, reduced = move.new.bucket, move.old.bucket.shard_gradient
        if bucket.shard_gradient is None:
            numel = bucket.layout.shard_numel(bucket.place.shard)
            bucket.shard_gradient = torch.zeros(numel, dtype=bucket.shard_dtype, device=bucket.device)
        own = None if reduced is None or move.old.shard_slice is None else move.old.view_into_shard(reduced)
        (arrived,) = _move_slices(move, [(own, bucket.shard_dtype)], collectives)
        if arrived is not None:
            move.new.view_into_shard(bucket.shard_gradient).copy_(arrived)


def _describe(optimizer: Optimizer, move: Move) -> dict[str, _Known]:
    """What this rank holds of one parameter's state."""
    shard = move.old.shard
    if shard is None or shard not in optimizer.state:
        return {}
    described = {}
    for key, value in optimizer.state[shard].items():
        # A count of steps on the host is of a scalar parameter's shape, too.
        if isinstance(value, Tensor) and value.shape == shard.shape and value.device == shard.device:
            described[key] = _Known(value.dtype, None, True)
        else:
            on_device = isinstance(value, Tensor) and value.device == shard.device
            described[key] = _Known(None, replace_leaves(value, lambda tensor: tensor.detach().cpu()), on_device)
    return described


def _tell_each_other(described: list[dict[str, _Known]], control: Collectives) -> list[dict[str, _Known]]:
    """What any rank holds of each parameter's state: the same on all."""
    known: list[dict[str, _Known]] = [{} for _ in described]
    for of_rank in all_gather_object(described, control.group):
        for entries, found in zip(known, of_rank, strict=True):
            entries.update(found)
    return known


def _value(entry: _Known, slot: ParameterSlot) -> Any:
    value = copy.deepcopy(entry.value)
    return value.to(slot.parameter.device) if entry.on_device else value


def _move_slices(
    move: Move, own: Sequence[tuple[Tensor | None, torch.dtype | None]], collectives: Collectives
) -> list[Tensor | None]:
    """Exchanges tensors that lie like the parameter.

    Args:
        move: Whose.
        own: This rank's parts under the old plan, each with its dtype; where it should have one and has none it is
            zero, as before an optimizer's first step.
        collectives: Carry them.

    Returns:
        This rank's parts under the new plan.
    """
    parts = [_flat(move.old, tensor, dtype) for tensor, dtype in own]
    arrived = [_flat(move.new, None, dtype) for _, dtype in own]
    outgoing: dict[int, list[Tensor]] = {}
    incoming: dict[int, list[Tensor]] = {}
    # Every group has a copy of the state: nothing moves between groups.
    for shard, other in enumerate(collectives.mates):
        to_send = _common(move.old.shard_slice, move.new.bucket.layout.slice_of(move.new.place, shard), parts)
        to_receive = _common(move.new.shard_slice, move.old.bucket.layout.slice_of(move.old.place, shard), arrived)
        if other == collectives.rank:
            for place, part in zip(to_receive, to_send, strict=True):
                place.copy_(part)
        else:
            outgoing[other], incoming[other] = to_send, to_receive
    exchange_chunks(collectives, outgoing, incoming)
    if move.new.shard is None or move.new.shard_slice is None:
        return [None] * len(own)
    shape, strides = move.new.shard.shape, move.new.shard.stride()
    return [None if part is None else part.as_strided(shape, strides) for part in arrived]


def _common(
    of_this_rank: ShardSlice | None, of_other: ShardSlice | None, parts: Sequence[Tensor | None]
) -> list[Tensor]:
    """What this rank's parts have in common with another rank's part of the parameter: views."""
    if of_this_rank is None or of_other is None:
        return []
    mine, theirs = of_this_rank.elements, of_other.elements
    start, stop = max(mine.start, theirs.start) - mine.start, min(mine.stop, theirs.stop) - mine.start
    return [part[start:stop] for part in parts if part is not None] if start < stop else []


def _flat(slot: ParameterSlot, tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A part as 1-D in storage order; zeros where there is none yet."""
    if slot.shard is None or slot.shard_slice is None:
        return None
    if tensor is None:
        return torch.zeros(slot.shard_slice.numel, dtype=dtype, device=slot.parameter.device)
    uncut = slot.shard_slice.numel == slot.place.numel
    return slot.storage_order(tensor.detach()) if uncut else tensor.detach().contiguous()
