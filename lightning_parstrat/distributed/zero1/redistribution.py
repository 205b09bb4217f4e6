"""Moves optimizer state, master weights and gradients to the ranks that own them under a new plan.

What a rank owns of a parameter under both plans is copied, the rest is sent once from its old owner to its new one: at
most all of the state, (N - 1) / N of it in the mean. It goes bucket by bucket, in one message from a rank to another;
who has what of whom follows from the layouts. What there is of a parameter's state is the same on all of its owners but
for which elements they have: one of them says it, unless they disagree.
"""

import copy
import pickle
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_gather_object, broadcast_object
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.exchange import exchange_chunks
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ParameterSlot

State = dict[str, Any]


class Move(NamedTuple):
    """A parameter's place under the old and under the new plan."""

    old: ParameterSlot
    new: ParameterSlot

    @property
    def changes_hands(self) -> bool:
        """Whether any of its elements gets another owner; the same on all ranks."""
        whole = slice(0, self.old.place.numel)
        return any(one != other for one, other in zip_longest(self.old.owners_of(whole), self.new.owners_of(whole)))


class _Known(NamedTuple):
    """One entry of a state: the dtype of a tensor that lies like the shard, or (None) any other value, on the host."""

    dtype: torch.dtype | None
    value: Any
    on_device: bool


_Entries = dict[str, _Known]


class _Carried(NamedTuple):
    """A tensor that lies like the parameter: this rank's part of it under the old plan, and room for that of the new.

    Both are 1-D, in storage order; None where the rank owns nothing of the parameter.
    """

    old: Tensor | None
    new: Tensor | None


@torch.no_grad()
def move_all(
    moves: Mapping[Tensor, Move],
    optimizers: Mapping[Optimizer, Sequence[Tensor]],
    carrier: Collectives,
    control: Collectives,
) -> dict[Optimizer, dict[Tensor, State]]:
    """Brings all that is kept of parameters to those who own them under the new plan. Collective.

    A few messages of control, in the logarithm of the number of ranks: 16 bytes for each parameter that changes hands,
    and what one rank says of their state. Then one exchange for each new bucket, of whose state there is a copy more
    while it lasts; the optimizers let go of what has left them.

    Args:
        moves: Of all parameters that change buckets, in the same order on all ranks.
        optimizers: Each with its parameters, in the same order on all ranks; its state is by shards of the old plan.
        carrier: Carries the elements; nothing is under way.
        control: Tells the others what there is; works on host memory.

    Returns:
        This rank's part of each optimizer's state, by shards of the new plan.
    """
    # By the layouts, which all ranks have: each must send and expect the same.
    changing = [
        (optimizer, moves[parameter])
        for optimizer, parameters in optimizers.items()
        for parameter in parameters
        if moves[parameter].changes_hands
    ]
    known: dict[Optimizer, dict[Tensor, _Entries]] = {optimizer: {} for optimizer in optimizers}
    for (optimizer, move), entries in zip(
        changing, _known_to_all(changing, carrier.shard_groups, control), strict=True
    ):
        known[optimizer][move.old.parameter] = entries
    states: dict[Optimizer, dict[Tensor, State]] = {
        optimizer: {
            new.shard: optimizer.state[old.shard]
            for old, new in (moves[parameter] for parameter in parameters)
            if old.shard is not None and new.shard is not None and old.shard in optimizer.state
        }
        for optimizer, parameters in optimizers.items()
    }
    for bucket in dict.fromkeys(move.new.bucket for move in moves.values()):
        _move_bucket(bucket, moves, known, states, carrier)
    return states


def _move_bucket(
    bucket: GradientBucket,
    moves: Mapping[Tensor, Move],
    known: Mapping[Optimizer, Mapping[Tensor, _Entries]],
    states: Mapping[Optimizer, dict[Tensor, State]],
    carrier: Collectives,
) -> None:
    """Fills a new bucket."""
    carried: list[tuple[Move, list[_Carried]]] = []
    for move in [moves[slot.parameter] for slot in bucket.slots]:
        of_move = [*_master_weights(move), *_gradient(move)]
        for optimizer, entries in known.items():
            of_move += _move_state(move, optimizer, entries.get(move.old.parameter, {}), states[optimizer])
        carried.append((move, of_move))
    _exchange(carried, carrier)


def _master_weights(move: Move) -> Iterator[_Carried]:
    if move.new.bucket.has_master_weights:
        yield _Carried(_flat(move.old, move.old.shard), _flat(move.new, move.new.shard))


def _gradient(move: Move) -> Iterator[_Carried]:
    """The reduced gradient that nobody has zeroed yet."""
    if not move.old.used:
        return
    bucket, reduced = move.new.bucket, move.old.bucket.shard_gradient
    if bucket.shard_gradient is None:
        numel = bucket.layout.shard_numel(bucket.place.shard)
        bucket.shard_gradient = torch.zeros(numel, dtype=bucket.shard_dtype, device=bucket.device)
    own = None if reduced is None or move.old.shard_slice is None else move.old.view_into_shard(reduced)
    room = None if move.new.shard_slice is None else move.new.view_into_shard(bucket.shard_gradient)
    yield _Carried(_own_or_zeros(move.old, own, bucket.shard_dtype), _flat(move.new, room))


def _move_state(move: Move, optimizer: Optimizer, entries: _Entries, states: dict[Tensor, State]) -> Iterator[_Carried]:
    """Makes this rank's state of a parameter that changes hands, and gives the parts of it that come from others."""
    if not entries:
        return
    # Whoever holds it still does so for the exchange only.
    own: State = {} if move.old.shard is None else optimizer.state.pop(move.old.shard, {})
    state: State = {}
    for key, entry in entries.items():
        if entry.dtype is None:
            state[key] = own[key] if key in own else _value(entry, move.new)
            continue
        room = None
        if move.new.shard is not None and move.new.shard_slice is not None:
            room = move.new.shard.new_empty(move.new.shard_slice.numel, dtype=entry.dtype)
            state[key] = room.as_strided(move.new.shard.shape, move.new.shard.stride())
        yield _Carried(_own_or_zeros(move.old, own.get(key), entry.dtype), room)
    if move.new.shard is not None:
        states[move.new.shard] = state


def _describe(optimizer: Optimizer, move: Move) -> _Entries:
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


def _known_to_all(
    changing: Sequence[tuple[Optimizer, Move]], groups: ShardGroups, control: Collectives
) -> list[_Entries]:
    """What any rank holds of each parameter's state: the same on all. Collective.

    Args:
        changing: Optimizers, and parameters of theirs that change hands.
        groups: Which ranks share a copy; the first group says what all have.
        control: Works on host memory.
    """
    described = [_describe(optimizer, move) for optimizer, move in changing]
    own = [None if move.old.shard is None else _digest(d) for d, (_, move) in zip(described, changing, strict=True)]
    digests = digests_of_owners(own, control)
    kinds = {digest: entries for digest, entries in zip(own, described, strict=True) if digest is not None}
    # The first owner of the first parameter of a kind says what it is: all ranks know who that is.
    speakers: dict[int, list[int]] = defaultdict(list)
    for kind, (_, move) in dict(zip(reversed(digests), reversed(changing), strict=True)).items():
        if kind not in (_NOTHING, _DISPUTED):
            first = next(move.old.owners_of(slice(0, move.old.place.numel)))
            speakers[groups.groups[0][first.shard]].append(kind)
    for rank, of_rank in sorted(speakers.items()):
        said = broadcast_object([kinds.get(digest, {}) for digest in of_rank], control.group, rank)
        kinds.update(zip(of_rank, said, strict=True))
    known = [{} if digest in (_NOTHING, _DISPUTED) else kinds[digest] for digest in digests]
    disputed = [place for place, digest in enumerate(digests) if digest == _DISPUTED]
    if disputed:
        # State that somebody has changed on some ranks alone. What any of them has, all get.
        for found in all_gather_object([described[place] for place in disputed], control.group):
            for place, entries in zip(disputed, found, strict=True):
                known[place] = {**known[place], **entries}
    return known


_NOTHING, _DISPUTED = 0, -1
"""Instead of a digest: no owner has any state, and owners have different ones."""


def digests_of_owners(own: Sequence[int | None], control: Collectives) -> list[int]:
    """For each parameter the digest that all of its owners have, or ``_DISPUTED``. Collective; 16 bytes for each.

    Args:
        own: This rank's, at least 0; None for a parameter that it owns nothing of.
        control: Works on host memory.
    """
    # The smallest is minus the largest negative: one all-reduce by MAX gives both. Who owns nothing does not count.
    least = -(2**62)
    both = torch.tensor([(least, least) if one is None else (one, -one) for one in own], dtype=torch.int64)
    if own:
        control.all_reduce(both, op=dist.ReduceOp.MAX).wait()
    pairs: list[tuple[int, int]] = both.view(-1, 2).tolist()
    return [_NOTHING if high == least else high if high == -low else _DISPUTED for high, low in pairs]


def _digest(entries: _Entries) -> int:
    """A number that differs (but for chance) between different states.

    Where it does between equal ones, too, all ranks tell each other what they have, which is slow, but right.
    """
    if not entries:
        return _NOTHING
    plain = [(key, str(entry.dtype), _plain(entry.value), entry.on_device) for key, entry in entries.items()]
    # Never zero.
    return digest(pickle.dumps(plain)) | 1


def _plain(value: Any) -> Any:
    """A value whose pickle does not depend on where its tensors lie in memory."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        content = real_view(value.detach()).cpu().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), content.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, _plain(part)) for key, part in value.items()]
    if isinstance(value, list | tuple | deque):
        return [_plain(part) for part in value]
    return value


def _value(entry: _Known, slot: ParameterSlot) -> Any:
    value = copy.deepcopy(entry.value)
    return value.to(slot.parameter.device) if entry.on_device else value


def _exchange(carried: Sequence[tuple[Move, Sequence[_Carried]]], carrier: Collectives) -> None:
    """Sends what other ranks own under the new plan, and receives what this one does: a message to and from each."""
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Tensor]] = defaultdict(list)
    # Both sides go through the same parameters and entries in one order; of each they have one stretch in common.
    for move, tensors in carried:
        leaving = _others_parts(move.old, move.new) if tensors else []
        arriving = _others_parts(move.new, move.old) if tensors else []
        for old, new in tensors:
            # Every group has a copy: nothing moves between groups.
            for shard, part in leaving:
                outgoing[carrier.mates[shard]].append(_bytes_of(old, part))
            for shard, part in arriving:
                incoming[carrier.mates[shard]].append(_bytes_of(new, part))
    here = carrier.rank
    for kept, own in zip(incoming.pop(here, []), outgoing.pop(here, []), strict=True):
        kept.copy_(own)
    messages = {rank: [torch.cat(parts)] for rank, parts in outgoing.items()}
    rooms = {rank: parts[0].new_empty(sum(part.numel() for part in parts)) for rank, parts in incoming.items()}
    exchange_chunks(carrier, messages, {rank: [room] for rank, room in rooms.items()})
    for rank, room in rooms.items():
        arrived = torch.split(room, [place.numel() for place in incoming[rank]])
        for place, found in zip(incoming[rank], arrived, strict=True):
            place.copy_(found)


def _others_parts(mine: ParameterSlot, theirs: ParameterSlot) -> list[tuple[int, slice]]:
    """Who has what, by the layout of ``theirs``, of what this rank has by that of ``mine``; counted from its first."""
    if mine.shard_slice is None:
        return []
    elements = mine.shard_slice.elements
    return [
        (part.shard, slice(part.start - elements.start, part.stop - elements.start))
        for part in theirs.owners_of(elements)
    ]


def _bytes_of(flat: Tensor | None, part: slice) -> Tensor:
    if flat is None:
        raise AssertionError("a part was asked for on a rank that owns nothing of the parameter")
    return real_view(flat[part]).view(torch.uint8)


def _flat(slot: ParameterSlot, tensor: Tensor | None) -> Tensor | None:
    """This rank's part as 1-D in storage order: a view where it lies as in the bucket."""
    if tensor is None or slot.shard_slice is None:
        return None
    uncut = slot.shard_slice.numel == slot.place.numel
    return slot.storage_order(tensor.detach()) if uncut else tensor.detach().contiguous()


def _own_or_zeros(slot: ParameterSlot, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same; zeros where this rank should have a part and has none, as before an optimizer's first step."""
    if slot.shard_slice is None:
        return None
    if tensor is None:
        return torch.zeros(slot.shard_slice.numel, dtype=dtype, device=slot.parameter.device)
    flat = _flat(slot, tensor)
    return None if flat is None else flat.to(dtype)
