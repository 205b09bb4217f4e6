"""Which collectives suit a process group and a device: torch's own, chunks that the ranks exchange, or none.

torch's own are for GPUs. Those between CPUs are in ``collectives.py``, but those for many ranks are here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.layout import even_bounds, parts_of
from lightning_parstrat.core.shard_groups import ShardGroups, piece_bounds
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import (
    Collectives,
    PairwiseCollectives,
    Tag,
    Tags,
    TwoLevelCollectives,
    real_view,
    split,
)
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.comm.work import (
    DONE,
    Exchange,
    Steps,
    Streams,
    Transfers,
    Work,
    as_work,
    streams_of,
)

MOST_BY_PAIRS = 16
"""The most CPU ranks with a message for each pair. With more ranks, Gloo's own collectives use a ring."""


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology | None = None,
    shard_groups: ShardGroups | None = None,
) -> Collectives:
    """The collectives that suit the group's size, its ranks' nodes, and the tensors' device.

    Not collective. Several shard groups on a GPU are an exception: they have separate process groups.

    Args:
        group: The process group.
        device: The device of the tensors.
        topology: Which ranks share a node. By default, all do.
        shard_groups: Which ranks share a copy of the sharded state. By default, all do.

    Raises:
        ValueError: The group sends from host memory, and the tensors are not there.
    """
    if dist.get_world_size(group) == 1:
        return LocalCollectives(group)
    if device.type != "cpu" and dist.get_backend(group) == "gloo":
        raise ValueError(
            f"process_group_backend='gloo' sends what is in a CPU's memory; gradients and parameters are on {device}."
            " Leave the argument out, and they are sent by NCCL; or train by `ddp`, which copies them to the host."
        )
    if shard_groups is not None and shard_groups.copies > 1:
        if device.type != "cpu":
            return _grouped_native(group, device, topology, shard_groups)
        return PairwiseCollectives(group, shard_groups)
    if device.type != "cpu":
        return _native(shard_groups or ShardGroups.of_all(dist.get_world_size(group)), topology)(group)
    if dist.get_world_size(group) > MOST_BY_PAIRS:
        return RingCollectives(group)
    if topology is not None and topology.has_two_levels:
        return TwoLevelCollectives(group, topology)
    return PairwiseCollectives(group)


def _native(groups: ShardGroups, topology: Topology | None) -> "type[NativeCollectives]":
    return WideningCollectives if groups.rings_carry_more(topology) else NativeCollectives


def _grouped_native(
    group: dist.ProcessGroup, device: torch.device, topology: Topology | None, groups: ShardGroups
) -> "GroupedNativeCollectives":
    rank = dist.get_rank(group)
    # If every rank has a separate copy, nothing is left to do within.
    within: Collectives = LocalCollectives(group)
    if groups.size > 1:
        within = _native(groups, topology)(subgroup(group, groups.mates(rank)))

    def between() -> Collectives:
        return NativeCollectives(subgroup(group, groups.holders(rank)))

    return GroupedNativeCollectives(group, groups, within, between, streams_of(device))


class LocalCollectives(Collectives):
    """World size 1: nothing to send. A sum may stay in its buffer."""

    sends_nothing = True

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        if shard.data_ptr() != buffer.data_ptr():
            # The shard's dtype may be wider.
            shard.copy_(buffer)
        return DONE

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return DONE


class NativeCollectives(Collectives):
    """torch's own collectives, of equal parts, as NCCL requires. An all-to-all brings unequal parts to their owners.

    For sums in a wider dtype than gradients are sent in, an all-to-all and a local sum replace the reduce-scatter. The
    all-to-all sends as many bytes. Until the sum, there is one more buffer of the bucket's size. Unequal parts are sent
    by two collectives, as ``collectives.py`` describes. A separate stream waits for the first, so neither the host nor
    the caller's stream waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._side: Any = None

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        # A range means equal parts (see `BucketLayout`), the only ones that torch's single-tensor collectives accept.
        if isinstance(bounds, range):
            return self._reduce_scatter_evenly(buffer, shard)
        equal = even_bounds(buffer.numel(), self.world_size)
        sums = shard.new_empty(equal.step)
        with self._beside(buffer.device):
            self._reduce_scatter_evenly(buffer, sums).wait()
            work = self._pass_on(sums, equal, shard, bounds)
        self.traffic.reduce_scatter_bytes += self._bytes_away(sums, equal, bounds)
        return Transfers([work], buffer, sums)

    def _reduce_scatter_evenly(self, buffer: Tensor, shard: Tensor) -> Work:
        self.traffic.reduce_scatter_bytes += buffer.nbytes - shard.numel() * buffer.element_size()
        if shard.dtype != buffer.dtype:
            return Exchange(self._exchange_and_sum(buffer, shard))
        work = _reduce_scatter_single(real_view(shard), real_view(buffer), group=self.group, async_op=True)
        return as_work(work)

    def _exchange_and_sum(self, buffer: Tensor, shard: Tensor) -> Steps:
        """A sum in a wider dtype than that of the data. A reduce-scatter would round partial sums at every rank."""
        received = torch.empty_like(buffer)
        yield as_work(dist.all_to_all_single(real_view(received), real_view(buffer), group=self.group, async_op=True))
        torch.sum(received.view(self.world_size, -1), 0, dtype=shard.dtype, out=shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if isinstance(bounds, range):
            # In place: if the input is this rank's part of the output, NCCL copies nothing.
            return self._all_gather_evenly(buffer, buffer.view(self.world_size, -1)[self.rank])
        equal = even_bounds(buffer.numel(), self.world_size)
        part, stepped = buffer.new_empty(equal.step), buffer[bounds[self.rank] : bounds[self.rank + 1]]
        with self._beside(buffer.device):
            self._pass_on(stepped, bounds, part, equal).wait()
            work = self._all_gather_evenly(buffer, part)
        self.traffic.all_gather_bytes += self._bytes_away(stepped, bounds, equal)
        return Transfers([work], buffer, part)

    def _all_gather_evenly(self, buffer: Tensor, part: Tensor) -> Work:
        self.traffic.all_gather_bytes += buffer.nbytes - part.nbytes
        return as_work(_all_gather_single(real_view(buffer), real_view(part), group=self.group, async_op=True))

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Within it, waits are made beside the caller's stream, after the work that it has queued."""
        streams = streams_of(device)
        launching = streams.current()
        self._side = self._side or streams.another()
        with streams.on(self._side):
            streams.wait_for(launching)
            yield

    def _pass_on(self, source: Tensor, had: Sequence[int], target: Tensor, wanted: Sequence[int]) -> Work:
        """Sends this rank's part by ``had`` to the ranks that need it by ``wanted``, and receives their parts."""
        rank, width = self.rank, 2 if source.is_complex() else 1
        received = [width * size for size in _sizes_by_rank(had, wanted[rank], wanted[rank + 1])]
        sent = [width * size for size in _sizes_by_rank(wanted, had[rank], had[rank + 1])]
        group = self.group
        # Both are parts of one buffer, in its order, and so are the messages: nothing need be sorted.
        work = dist.all_to_all_single(real_view(target), real_view(source), received, sent, group=group, async_op=True)
        return as_work(work)

    def _bytes_away(self, source: Tensor, had: Sequence[int], wanted: Sequence[int]) -> int:
        stay = max(0, min(had[self.rank + 1], wanted[self.rank + 1]) - max(had[self.rank], wanted[self.rank]))
        return source.nbytes - stay * source.element_size()


class WideningCollectives(NativeCollectives):
    """Gradients that are summed in a wider dtype are widened first, and summed by a ring.

    An all-to-all sends most of a rank's data over its own network interface. A ring sends each byte over one interface
    of a node. So twice the bytes take less time there. Until the sum is done, there is one more buffer of the wider
    bucket's size.
    """

    widens = True

    @override
    def _reduce_scatter_evenly(self, buffer: Tensor, shard: Tensor) -> Work:
        return super()._reduce_scatter_evenly(buffer.to(shard.dtype), shard)


class RingCollectives(PairwiseCollectives):
    """Gloo's own collectives carry equal parts, in about twice the bytes, by a ring.

    Gradients that are summed in a wider dtype are widened first.
    """

    widens = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # Gloo identifies its collectives by their order. If owners pass on their parts, a thread launches some
        # collectives. From then on, it launches all.
        self._launches_in_thread = False

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if not isinstance(bounds, range):
            self._launches_in_thread = self._has_several_steps = True
        return super()._all_gather(buffer, bounds)

    @override
    def _sum_evenly(self, buffer: Tensor, shard: Tensor, bounds: range, tags: Tags) -> Steps:
        # Each step takes a tag, whether or not it sends messages: the step's number decides which thread launches the
        # next.
        if self._launches_in_thread:
            next(tags)
            yield DONE
        next(tags)
        wide = buffer.to(shard.dtype)
        self.count("reduce_scatter_bytes", wide.nbytes - shard.nbytes)
        yield as_work(_reduce_scatter_single(real_view(shard), real_view(wide), group=self.group, async_op=True))

    @override
    def _gather_evenly(self, buffer: Tensor, bounds: range, tags: Tags) -> Steps:
        if self._launches_in_thread and next(tags) == Tag.EXCHANGE:
            yield DONE
        own = split(buffer, bounds)[self.rank]
        self.count("all_gather_bytes", buffer.nbytes - own.nbytes)
        yield as_work(_all_gather_single(real_view(buffer), real_view(own), group=self.group, async_op=True))


class GroupedNativeCollectives(Collectives):
    """torch's own collectives, by process groups of a group's ranks and of those that hold the same shard.

    Args:
        group: The process group of all ranks. It carries small messages.
        groups: Which ranks share a copy.
        within: Reduce-scatters and all-gathers among this rank's group.
        between: Makes the collectives of the ranks that hold this rank's shard. It is called at the first sum.
        streams: Streams of the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        groups: ShardGroups,
        within: Collectives,
        between: Callable[[], Collectives],
        streams: Streams,
    ) -> None:
        super().__init__(group, groups)
        self._within = within
        self.widens = within.widens
        # Only this host's thread counts.
        within.traffic = self.traffic
        self._between: Collectives | None = None
        self._make_between = between
        self._streams = streams
        self._beside = streams.another()

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        self.traffic.all_reduces += 1
        pieces = [stop - start for start, stop in pairwise(piece_bounds(shard.numel(), self.place.copies))]
        # As between CPUs: each rank sums a piece and sends the others the sum. No way sends less.
        own = (self.place.copies - 2) * pieces[self.place.copy] + shard.numel()
        self.traffic.all_reduce_bytes += own * shard.element_size()
        if self._between is None:
            self._between = self._make_between()
        current = self._streams.current()
        # The second sum begins after the first, on a separate stream, so that backward does not wait for either.
        with self._streams.on(self._beside):
            self._streams.wait_for(current)
            self._within._reduce_scatter(buffer, shard, bounds).wait()
            second = as_work(self._between.group.allreduce([real_view(shard)]))
        # Both buffers stay until a wait on the stream on which they were allocated.
        return Transfers([second], buffer, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return self._within._all_gather(buffer, bounds)


def _sizes_by_rank(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """How many of the elements ``[start, stop)`` are in each shard, by its number: the argument of an all-to-all."""
    sizes = [0] * (len(bounds) - 1)
    for part in parts_of(bounds, start, stop):
        sizes[part.shard] = part.numel
    return sizes


# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
