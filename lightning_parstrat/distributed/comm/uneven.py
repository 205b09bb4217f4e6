"""Parts of different length, as whole parameters make them, carried by collectives of equal parts.

Were each part sent to its owner by every rank, the owner of a large matrix would receive N copies of it at once. So a
bucket is reduce-scattered in equal parts, however it is owned, and the sums are passed on to their owners, each element
once. To gather, owners first pass on what they have stepped, then equal parts are gathered. Each way a rank sends
less than 1 / N of a bucket more in the mean, and one that owns all of it a bucket; for a bucket a rank never receives
more at once than its length and its own part of it.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.layout import even_bounds, parts_of
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.process_groups import Message, Tag
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Transfers, Work


class _Held(NamedTuple):
    """What a rank has of a buffer: its elements from ``start`` on, in ``memory``."""

    memory: Tensor
    start: int

    def part(self, start: int, stop: int) -> Tensor:
        return self.memory[start - self.start : stop - self.start]


class UnevenCollectives(Collectives):
    """Between CPUs: any parts, by collectives of equal ones and messages to the owners.

    The length of a buffer must be a multiple of the world size, as that of a
    :class:`~lightning_parstrat.core.layout.BucketLayout` is.

    Args:
        even: Carries equal parts; sums are made in its order.
    """

    def __init__(self, even: Collectives) -> None:
        super().__init__(even.group, even.shard_groups)
        self.even = even
        """Carries equal parts."""
        self.traffic = even.traffic
        self.widens = even.widens
        # Sums leave when they have been made, and gathers when owners have sent their parts; the caller waits for
        # neither. One thread for each, so that all ranks launch in the same order.
        self._sums = ExchangeThread("sums for their owners")
        self._gathers = ExchangeThread("gathers of equal parts")
        self._launches_in_order = False

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        if isinstance(bounds, range):
            return self._launch(lambda: self.even._reduce_scatter(buffer, shard, bounds))
        equal = even_bounds(buffer.numel(), self.shard_count)
        sums = shard.new_empty(equal.step)
        summed = self._launch(lambda: self.even._reduce_scatter(buffer, sums, equal))
        held = _Held(sums, equal[self.place.shard])
        self._count("reduce_scatter_bytes", held, equal, bounds)
        work = ExchangedWork()

        def pass_on() -> None:
            summed.wait()
            self._pass_on(held, equal, _Held(shard, bounds[self.place.shard]), bounds, Tag.SUMS_TO_OWNERS).wait()
            work.finish()

        self._sums.run(work, pass_on)
        return work

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if isinstance(bounds, range):
            return self._launch(lambda: self.even._all_gather(buffer, bounds))
        equal = even_bounds(buffer.numel(), self.shard_count)
        whole = _Held(buffer, 0)
        self._count("all_gather_bytes", whole, bounds, equal)
        passed_on = self._pass_on(whole, bounds, whole, equal, Tag.PARTS_FROM_OWNERS)

        def gather() -> Work:
            passed_on.wait()
            return self.even._all_gather(buffer, equal)

        # From now on a thread launches, and what is launched later must come after.
        self._launches_in_order = True
        return self._launch(gather)

    def _launch(self, launch: Callable[[], Work]) -> Work:
        """Launches exchanges of equal parts in the order of the calls, which is the same on all ranks."""
        if not self._launches_in_order:
            return launch()
        launched = _Launched()
        self._gathers.run(launched.by_thread, lambda: launched.launch(launch))
        return launched

    def _pass_on(self, source: _Held, had: Sequence[int], target: _Held, wanted: Sequence[int], tag: Tag) -> Work:
        """Sends what this rank has to those who want it, and receives what it wants from those who have it.

        Args:
            source: Holds this rank's part by the bounds ``had``.
            had: Who has what.
            target: Gets this rank's part by the bounds ``wanted``.
            wanted: Who wants what.
            tag: Of the messages.
        """
        shard = self.place.shard
        messages = []
        for part in parts_of(had, wanted[shard], wanted[shard + 1]):
            place = target.part(part.start, part.stop)
            if part.shard != shard:
                messages.append(Message(False, real_view(place), self.mates[part.shard]))
            elif source.memory is not target.memory:
                place.copy_(source.part(part.start, part.stop))
        for part in parts_of(wanted, had[shard], had[shard + 1]):
            if part.shard != shard:
                leaving = real_view(source.part(part.start, part.stop))
                messages.append(Message(True, leaving, self.mates[part.shard]))
        messages.sort(key=attrgetter("peer"))
        return Transfers(self.point_to_point.launch(messages, tag), source.memory, target.memory)

    def _count(self, counter: str, source: _Held, had: Sequence[int], wanted: Sequence[int]) -> None:
        shard = self.place.shard
        away = sum(part.numel for part in parts_of(wanted, had[shard], had[shard + 1]) if part.shard != shard)
        self.even.count(counter, away * source.memory.element_size())


class _Launched:
    """An exchange that a thread launches."""

    def __init__(self) -> None:
        self.by_thread = ExchangedWork()
        self._work: Work | None = None

    def launch(self, launch: Callable[[], Work]) -> None:
        """Launches it; to be called once, by the thread."""
        self._work = launch()
        self.by_thread.finish()

    def wait(self) -> None:
        """Blocks until it has ended.

        Raises:
            RuntimeError: It failed, for instance because another rank has ended.
        """
        self.by_thread.wait()
        if self._work is not None:
            self._work.wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.by_thread.is_completed() and (self._work is None or self._work.is_completed())


def sizes_by_rank(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """How many of the elements ``[start, stop)`` are in each shard, by its number: what an all-to-all takes."""
    sizes = [0] * (len(bounds) - 1)
    for part in parts_of(bounds, start, stop):
        sizes[part.shard] = part.numel
    return sizes
