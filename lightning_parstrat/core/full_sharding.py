"""Bytes that a rank holds and sends where torch's FSDP2 shards parameters, gradients and optimizer state (ZeRO-3).

Between steps that is a part of everything: with Adam in fp32 on N ranks 16/N bytes per parameter. Within a step whole
units come on top: their parameters, twice while one is gathered; their gradients, twice while these are reduced.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_parstrat.core.memory import HeldBytes

Shape = tuple[int, ...]


class GatheredUnit(NamedTuple):
    """Parameters that are gathered, used and freed together: their shapes, each of at least one dimension.

    Attributes:
        trained: Of those that are trained.
        frozen: Of those that are not.
        exact: Of those among them that are gathered as they are sharded even if others are gathered in 16 bits.
    """

    trained: Sequence[Shape]
    frozen: Sequence[Shape] = ()
    exact: Sequence[Shape] = ()


class ItemSizes(NamedTuple):
    """Bytes of an element."""

    sharded: int = 4
    """Of what optimizers step, and of its gradient."""
    gathered: int = 4
    """Of what is gathered and used."""
    gradient: int = 4
    """Of what backward computes."""
    summed: int = 4
    """Of gradients as they are summed over ranks."""
    sent: int = 4
    """Of gradients as they travel."""
    cast: int = 0
    """Of the copy that autocast makes of a parameter and keeps until its backward: 2 where fp32 is gathered."""


class FullySharded(NamedTuple):
    """A module as FSDP2 sees it.

    Attributes:
        root: What is gathered from the beginning of a step to its end.
        units: What is gathered for a forward and for a backward, in the order of forward.
        world_size: The number of ranks.
    """

    root: GatheredUnit
    units: Sequence[GatheredUnit]
    world_size: int

    def held_bytes(self, rank: int, itemsize: int, state_per_element: float) -> HeldBytes:
        """What ``rank`` holds between two steps, and between two micro-batches.

        Rows of a parameter are dealt out in equal parts, so that rank 0 holds most; padding has no optimizer state.

        Args:
            rank: The rank.
            itemsize: Bytes of an element of a shard.
            state_per_element: Bytes of optimizer state for each element that is stepped; Adam in fp32: 8.
        """
        every = [self.root, *self.units]
        trained = [shape for unit in every for shape in unit.trained]
        padded = sum(_rows(shape, self.world_size) * math.prod(shape[1:]) for shape in trained)
        frozen = sum(_rows(shape, self.world_size) * math.prod(shape[1:]) for unit in every for shape in unit.frozen)
        stepped = sum(_rows_of(shape, self.world_size, rank) * math.prod(shape[1:]) for shape in trained)
        return HeldBytes(
            parameters=(padded + frozen) * itemsize,
            master_weights=0,
            optimizer_state=round(stepped * state_per_element),
            gradient_shards=padded * itemsize,
        )

    def peak_bytes(self, held: HeldBytes, sizes: ItemSizes, accumulates: bool) -> int:
        """The most within a step, without activations and what optimizers need for a moment.

        Args:
            held: Between two steps.
            sizes: Bytes of an element.
            accumulates: Whether gradients of earlier micro-batches are there in backward.
        """
        forward = held.total + max(self._in_forward(sizes))
        backward = held.total - held.gradient_shards + max(self._in_backward(sizes, accumulates))
        return max(forward, backward)

    def sent_bytes(self, sizes: ItemSizes) -> "SentBytes":
        """What a rank sends for one micro-batch: parameters in forward; again in backward, and gradients."""
        share = (self.world_size - 1) / self.world_size
        root, units = self._gathered(self.root, sizes), sum(self._gathered(unit, sizes) for unit in self.units)
        gradients = sum(self._padded(unit.trained) for unit in (self.root, *self.units)) * sizes.sent
        return SentBytes(forward=share * (root + units), backward=share * (units + gradients))

    def _gathered(self, unit: GatheredUnit, sizes: ItemSizes) -> int:
        more = self._padded(unit.exact) * (sizes.sharded - sizes.gathered)
        return self._padded((*unit.trained, *unit.frozen)) * sizes.gathered + more

    def _reduced(self, unit: GatheredUnit, sizes: ItemSizes) -> int:
        # Those that are rounded to be sent are there twice: packed, and rounded.
        rounded = sizes.sent if sizes.sent < sizes.summed else 0
        return self._padded(unit.trained) * (sizes.summed + rounded)

    def _cast(self, units: Sequence[GatheredUnit], sizes: ItemSizes) -> int:
        every = [shape for unit in units for shape in (*unit.trained, *unit.frozen)]
        exact = [shape for unit in units for shape in unit.exact]
        return (sum(map(math.prod, every)) - sum(map(math.prod, exact))) * sizes.cast

    def _padded(self, shapes: Sequence[Shape]) -> int:
        return sum(_rows(shape, self.world_size) * self.world_size * math.prod(shape[1:]) for shape in shapes)

    def _in_forward(self, sizes: ItemSizes) -> Iterator[int]:
        gathered = [self._gathered(unit, sizes) for unit in (self.root, *self.units)]
        root = gathered[0]
        # What has been received, and its copy into parameters.
        yield 2 * root
        for number, (before, unit) in enumerate(pairwise(gathered)):
            # What was received is kept until the next unit's has been received and copied.
            yield root + before + 2 * unit + self._cast([self.root, *self.units[:number]], sizes)

    def _in_backward(self, sizes: ItemSizes, accumulates: bool) -> Iterator[int]:
        """What there is beside sharded parameters and optimizer state."""
        every = sum(self._padded(unit.trained) for unit in (self.root, *self.units))
        shards = every // self.world_size * sizes.sharded if accumulates else 0
        root = self._gathered(self.root, sizes)
        of_root = self._padded(self.root.trained) * sizes.gradient
        gathered = [self._gathered(unit, sizes) for unit in self.units]
        sent_before = 0
        for number in reversed(range(len(self.units))):
            trained = self.units[number].trained
            own, sent = self._padded(trained) * sizes.gradient, self._reduced(self.units[number], sizes)
            following = gathered[number - 1] if number else 0
            # This rank's part as it was gathered, its shards in the same dtype, and a byte per element to compare.
            compared = (2 * sizes.gathered + 1) * self._padded(trained) // self.world_size
            compared *= sizes.gathered < sizes.sharded
            # It is copied into parameters; or its last gradient is there, and what it had received has given way to the
            # following unit's; or its gradients are packed, and its parameters are gone.
            beside = max(
                2 * gathered[number] + sent_before,
                gathered[number] + following + own + sent_before + compared,
                following + own + sent,
            )
            yield shards + root + of_root + beside + self._cast([self.root, *self.units[: number + 1]], sizes)
            shards += 0 if accumulates else self._padded(trained) // self.world_size * sizes.sharded
            sent_before = sent
        yield shards + of_root + max(root + sent_before, self._reduced(self.root, sizes))


class SentBytes(NamedTuple):
    """What a rank sends for one micro-batch."""

    forward: float
    backward: float


def _rows(shape: Shape, world_size: int) -> int:
    """Of each rank, padding included."""
    return math.ceil(shape[0] / world_size)


def _rows_of(shape: Shape, world_size: int, rank: int) -> int:
    """Of that rank, without padding."""
    rows = _rows(shape, world_size)
    return max(0, min(rows, shape[0] - rank * rows))
