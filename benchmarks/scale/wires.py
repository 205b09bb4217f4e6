"""What an operation of a process group comes to on the wire: messages, hops, and who is talked to.

Gloo's, read in its sources: rings for all-reduce and all-gather, binomial trees for broadcast, direct messages for
gather, scatter and all-to-all, dissemination for the barrier.
"""

import math
from typing import NamedTuple

from benchmarks.scale.events import Kind

_ELEMENT = 4


def ring_segments(nbytes: int, size: int) -> int:
    """Into how many parts, not empty, Gloo's ring cuts what it reduces: two for each rank, but for small tensors."""
    elements = max(1, nbytes // _ELEMENT)
    return math.ceil(elements / math.ceil(elements / (2 * size)))


def gloo_messages(kind: Kind, nbytes: int, rank: int, size: int, peer: int | None) -> int:
    """Messages that this rank sends."""
    if kind == "all_reduce":
        # In each half of the ring, every segment leaves every rank but one.
        return 2 * max(1, ring_segments(nbytes, size) * (size - 1) // size)
    if kind == "broadcast":
        return len(_children(rank, size, peer or 0))
    if kind == "gather":
        return int(rank != peer)
    if kind == "scatter":
        return size - 1 if rank == peer else 0
    if kind == "barrier":
        return math.ceil(math.log2(size))
    if kind == "recv":
        return 0
    return 1 if kind == "send" else size - 1


def gloo_hops(kind: Kind, nbytes: int, size: int) -> int:
    """Messages that follow one upon the other, over all ranks."""
    if kind in ("send", "recv"):
        return 1
    if kind in ("gather", "scatter", "all_to_all"):
        # Those of one rank: its card takes or gives one after the other.
        return size - 1
    if kind in ("broadcast", "barrier"):
        return math.ceil(math.log2(size))
    return 2 * (size - 1) if kind == "all_reduce" else size - 1


def gloo_peers(kind: Kind, rank: int, size: int, peer: int | None) -> set[int]:
    """The ranks that this one needs a connection to."""
    if kind in ("send", "recv"):
        return {peer} if peer is not None else set()
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
        return {(rank + 1) % size, (rank - 1) % size}
    if kind == "broadcast":
        return set(_children(rank, size, peer or 0)) | _parent(rank, size, peer or 0)
    if kind == "barrier":
        steps = [2**power for power in range(math.ceil(math.log2(size)))]
        return {(rank + step) % size for step in steps} | {(rank - step) % size for step in steps}
    if kind in ("gather", "scatter") and rank != peer:
        return set() if peer is None else {peer}
    return set(range(size)) - {rank}


def _children(rank: int, size: int, root: int) -> list[int]:
    place = (rank - root) % size
    powers = [2**power for power in range(math.ceil(math.log2(size)))]
    return [(place + power + root) % size for power in powers if place < power and place + power < size]


def _parent(rank: int, size: int, root: int) -> set[int]:
    place = (rank - root) % size
    return set() if place == 0 else {(place - 2 ** (place.bit_length() - 1) + root) % size}


class Wire(NamedTuple):
    """What operations take, where the code that is played looks at the clock: for its plans, not for results.

    Attributes:
        hop_seconds: Of a message.
        seconds_per_byte: Of what a rank sends.
    """

    hop_seconds: float
    seconds_per_byte: float

    def seconds(self, kind: Kind, nbytes: int, size: int) -> float:
        """The time of one operation; what is sent travels while others' messages come."""
        if kind == "send":
            return 0.0
        return gloo_hops(kind, nbytes, size) * self.hop_seconds + nbytes * self.seconds_per_byte


GLOO = Wire(hop_seconds=40e-6, seconds_per_byte=1 / 1e9)
NCCL = Wire(hop_seconds=1.7e-6, seconds_per_byte=1 / 50e9)
