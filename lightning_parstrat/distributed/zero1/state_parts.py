"""What each rank holds of an optimizer's sharded state: by the layout, which all ranks know, and by what they tell.

Which elements a rank has follows from the buckets. What does not (which entries the state has, their dtypes, counts of
steps) is usually the same in all of a bucket: ranks compare numbers, and describe what they have where these differ.
"""

import copy
import hashlib
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import receive_object, send_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot

MASTER_WEIGHTS = "master_weights"
"""Where a state dict keeps master weights, by position as ``"state"`` is. Other strategies pass over it."""


class Entry(NamedTuple):
    """One entry of a shard's state: a tensor that lies like the shard (then its dtype), or any other value."""

    dtype: torch.dtype | None
    value: Any


Entries = Mapping[str, Entry]
"""What is kept for one parameter, in the optimizer's order."""


class BucketState:
    """The parameters of one bucket whose state an optimizer keeps.

    Args:
        slots: All of one bucket, at least one.
    """

    def __init__(self, slots: Iterable[ParameterSlot]) -> None:
        self.slots = sorted((slot for slot in slots if slot.place.numel), key=lambda slot: slot.place.offset)
        self._starts = [slot.place.offset for slot in self.slots]

    @property
    def first_shard(self) -> int:
        """The first shard with a part of any of them."""
        return bisect_right(self.slots[0].bucket.layout.bounds, self._starts[0]) - 1

    def parts_of(self, shard: int) -> Iterator[tuple[ParameterSlot, slice]]:
        """What is in a shard: the parameters, and which elements of each, in storage order."""
        bounds = self.slots[0].bucket.layout.bounds
        first = max(bisect_right(self._starts, bounds[shard]) - 1, 0)
        for slot in self.slots[first:]:
            if slot.place.offset >= bounds[shard + 1]:
                return
            elements = slot.elements_of(shard)
            if elements.start < elements.stop:
                yield slot, elements


def states_by_bucket(slots: Iterable[ParameterSlot]) -> list[BucketState]:
    """The slots by the buckets that they lie in, in the order in which these are found; without empty parameters."""
    by_bucket: dict[int, list[ParameterSlot]] = {}
    for slot in slots:
        if slot.place.numel:
            by_bucket.setdefault(id(slot.bucket), []).append(slot)
    return [BucketState(found) for found in by_bucket.values()]


class ToldState:
    """What ranks have told of the state in one bucket.

    Args:
        bucket: The parameters.
        of_all: What is kept for each of them alike, where ranks agree on that.
        by_shard: Else for the parts of each shard, in their order.
    """

    def __init__(
        self, bucket: BucketState, of_all: Entries | None, by_shard: Mapping[int, Sequence[Entries]] | None = None
    ) -> None:
        self.bucket = bucket
        self._of_all = of_all
        self._by_shard = by_shard or {}

    def parts_of(self, shard: int) -> Iterator[tuple[ParameterSlot, slice, Entries]]:
        """What is in a shard: the parameters, which elements of each, and what is kept for it there."""
        for number, (slot, elements) in enumerate(self.bucket.parts_of(shard)):
            yield slot, elements, self._by_shard[shard][number] if self._of_all is None else self._of_all

    def by_slot(self) -> dict[ParameterSlot, dict[str, Entry]]:
        """What is kept for each parameter; the values are copies. Where ranks differ, what any of them keeps."""
        if self._of_all is not None:
            return {slot: {key: copy.deepcopy(one) for key, one in self._of_all.items()} for slot in self.bucket.slots}
        found: dict[ParameterSlot, dict[str, Entry]] = {}
        for shard in sorted(self._by_shard):
            for slot, _, entries in self.parts_of(shard):
                known = found.setdefault(slot, {})
                known.update({key: copy.deepcopy(one) for key, one in entries.items() if key not in known})
        return found


def tell(
    optimizer: Optimizer, buckets: Sequence[BucketState], ranks: Sequence[int], control: Collectives, destination: int
) -> list[ToldState]:
    """Tells one rank what the others hold, and each rank what it holds itself. Collective.

    One small reduction of 16 bytes a bucket. Where ranks hold the same entries and values for all parameters of a
    bucket, nothing else is sent, unless the destination has no part of it; then the first that has describes it. Where
    they do not, each rank describes its own parts of that bucket.

    Args:
        optimizer: Its state is described.
        buckets: The same on all ranks.
        ranks: The ranks that together hold one copy, in the order of their shards.
        control: Of all ranks; works on host memory.
        destination: Who is told.

    Returns:
        By bucket: what all know on the destination, on other ranks what they know of their own shards.
    """
    shard = ranks.index(control.rank) if control.rank in ranks else None
    own: list[list[Entries]] = [
        [] if shard is None else [describe(optimizer, slot) for slot, _ in bucket.parts_of(shard)] for bucket in buckets
    ]
    differing = _differing(own, control)
    by_shard: list[dict[int, list[Entries]]] = [{} if shard is None or not of else {shard: of} for of in own]
    for teller, numbers in _tellers(buckets, differing, ranks, destination).items():
        if control.rank == destination:
            for number, described in receive_object(ranks[teller], control.group).items():
                by_shard[number][teller] = described
        elif teller == shard:
            send_object({number: own[number] for number in numbers}, destination, control.group)
    return [
        ToldState(bucket, None if differs or not of else next(iter(of.values()))[0], of)
        for bucket, differs, of in zip(buckets, differing, by_shard, strict=True)
    ]


def describe(optimizer: Optimizer, slot: ParameterSlot) -> dict[str, Entry]:
    """What this rank holds for the slot's shard: sharded tensors by dtype, everything else by value on the host."""
    shard = slot.shard
    if shard is None:
        raise AssertionError("state was found for a shard that does not exist")
    entries = {MASTER_WEIGHTS: Entry(shard.dtype, None)} if slot.has_master_weights else {}
    for key, value in optimizer.state.get(shard, {}).items():
        if isinstance(value, Tensor) and value.shape == shard.shape:
            entries[key] = Entry(value.dtype, None)
        else:
            entries[key] = Entry(None, on_host(value))
    return entries


def on_host(value: Any) -> Any:
    """A value with its tensors in host memory."""
    return replace_leaves(value, lambda tensor: tensor.detach().cpu())


def _differing(own: Sequence[Sequence[Entries]], control: Collectives) -> list[bool]:
    """For each bucket, whether there are parameters of which other things are kept than of others. Collective."""
    # The largest and the smallest number of all ranks; a rank without a part of a bucket has none to say.
    extremes = torch.full((2, len(own)), -(2**62), dtype=torch.int64)
    for number, described in enumerate(own):
        numbers = {_number_of(entries) for entries in described}
        if len(numbers) == 1:
            only = numbers.pop()
            extremes[0, number], extremes[1, number] = only, -only
        elif numbers:
            extremes[:, number] = 2**62
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    return [largest != -smallest for largest, smallest in zip(*extremes.tolist(), strict=True)]


def _number_of(entries: Entries) -> int:
    """61 bits that are the same where all entries are: their order, too."""
    said = [(key, str(one.dtype), replace_leaves(one.value, _content)) for key, one in entries.items()]
    return int.from_bytes(hashlib.sha256(pickle.dumps(said)).digest()[:8], "big") >> 3


def _content(tensor: Tensor) -> Any:
    # A pickled tensor has an address in it.
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tellers(
    buckets: Sequence[BucketState], differing: Sequence[bool], ranks: Sequence[int], destination: int
) -> dict[int, list[int]]:
    """Which shards' owners describe which buckets to the destination: the same on all ranks, which are in its order."""
    tellers: dict[int, list[int]] = {}
    own = ranks.index(destination) if destination in ranks else None
    for number, (bucket, differs) in enumerate(zip(buckets, differing, strict=True)):
        if not differs:
            knows = own is not None and next(bucket.parts_of(own), None) is not None
            owners = [] if knows else [bucket.first_shard]
        else:
            owners = [other for other in range(len(ranks)) if next(bucket.parts_of(other), None) is not None]
        for other in owners:
            if other != own:
                tellers.setdefault(other, []).append(number)
    return dict(sorted(tellers.items()))
