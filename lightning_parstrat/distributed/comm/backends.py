"""Which collectives suit a process group and a device: torch's own, or chunks that the ranks exchange.

torch's own are for GPUs. Those between CPUs are in ``collectives.py``.
"""

import weakref
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
    TwoLevelCollectives,
    existing,
    real_view,
)
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.comm.work import DONE, Exchange, Steps, Streams, Transfers, Work


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
    groups = shard_groups or ShardGroups.of_all(dist.get_world_size(group))
    if device.type != "cpu" and groups.world_size > 1:
        if dist.get_backend(group) == "gloo":
            raise ValueError(
                "process_group_backend='gloo' sends what is in a CPU's memory; gradients and parameters are on"
                f" {device}. Leave the argument out, and they are sent by NCCL; or train by `ddp`, which copies them"
                " to the host."
            )
        return NativeCollectives(group, groups, groups.rings_carry_more(topology))
    if groups.copies == 1 and topology is not None and topology.has_two_levels:
        return TwoLevelCollectives(group, topology)
    return PairwiseCollectives(group, groups)


class NativeCollectives(Collectives):
    """torch's own collectives, of equal parts, as NCCL requires. An all-to-all brings unequal parts to their owners.

    For sums in a wider dtype than gradients are sent in, an all-to-all and a local sum replace the reduce-scatter. The
    all-to-all sends as many bytes. Until the sum, there is one more buffer of the bucket's size. Unequal parts are sent
    by two collectives, as ``collectives.py`` describes. Several groups of ranks have separate process groups. A second
    sum is then made by the ranks that hold the same shard. A separate stream waits for the first of two collectives, so
    neither the host nor the caller's stream waits.

    Args:
        group: The process group of all ranks. It carries small messages.
        groups: Which ranks share a copy. By default, all do.
        widens: Whether gradients that are summed in a wider dtype are widened first, and summed by a ring. An
            all-to-all sends most of a rank's data over its own network interface. A ring sends each byte over one
            interface of a node. So twice the bytes take less time there.
    """

    def __init__(self, group: dist.ProcessGroup, groups: ShardGroups | None = None, widens: bool = False) -> None:
        super().__init__(group, groups)
        self.widens = widens
        self._mates_group = self._group
        if self.place.copies > 1 and self.shard_count > 1:
            self._mates_group = weakref.ref(subgroup(group, self.mates))
        self._side: Any = None

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        # A range means equal parts (see `BucketLayout`), the only ones that torch's single-tensor collectives accept.
        is_even = isinstance(bounds, range) or self.shard_count == 1
        if is_even and self.place.copies == 1:
            return self._sum_evenly(buffer, shard)
        equal = even_bounds(buffer.numel(), self.shard_count)
        sums = shard if is_even else shard.new_empty(equal.step)
        with self._beside(buffer.device):
            work = self._sum_evenly(buffer, sums)
            if not is_even:
                work.wait()
                work = self._pass_on(sums, equal, shard, bounds)
                self.bytes_sent += self._bytes_away(sums, equal, bounds)
            if self.place.copies > 1:
                work.wait()
                work = self._sum_between_groups(shard)
        # The buffers stay until a wait on the stream on which they were allocated.
        return Transfers([work], buffer, sums, shard)

    def _sum_evenly(self, buffer: Tensor, shard: Tensor) -> Work:
        if self.shard_count == 1:
            shard.copy_(buffer)
            return DONE
        if self.widens:
            buffer = buffer.to(shard.dtype)
        self.bytes_sent += buffer.nbytes - shard.numel() * buffer.element_size()
        if shard.dtype != buffer.dtype:
            return Exchange(self._exchange_and_sum(buffer, shard))
        group = existing(self._mates_group)
        return _reduce_scatter_single(real_view(shard), real_view(buffer), group=group, async_op=True)

    def _exchange_and_sum(self, buffer: Tensor, shard: Tensor) -> Steps:
        """A sum in a wider dtype than that of the data. A reduce-scatter would round partial sums at every rank."""
        received, group = torch.empty_like(buffer), existing(self._mates_group)
        yield _all_to_all(real_view(received), real_view(buffer), group=group, async_op=True)
        torch.sum(received.view(self.shard_count, -1), 0, dtype=shard.dtype, out=shard)

    def _sum_between_groups(self, shard: Tensor) -> Work:
        pieces = [stop - start for start, stop in pairwise(piece_bounds(shard.numel(), self.place.copies))]
        # As between CPUs: each rank sums a piece and sends the others the sum. No way sends less.
        sent = (self.place.copies - 2) * pieces[self.place.copy] + shard.numel()
        self.bytes_sent += sent * shard.element_size()
        # Made at the first sum: parameters are only gathered.
        holders = subgroup(self.group, self.shard_groups.holders(self.rank))
        return holders.allreduce([real_view(shard)])

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if self.shard_count == 1:
            return DONE
        shard = self.place.shard
        if isinstance(bounds, range):
            # In place: if the input is this rank's part of the output, NCCL copies nothing.
            return self._gather_evenly(buffer, buffer.view(self.shard_count, -1)[shard])
        equal = even_bounds(buffer.numel(), self.shard_count)
        part, stepped = buffer.new_empty(equal.step), buffer[bounds[shard] : bounds[shard + 1]]
        with self._beside(buffer.device):
            self._pass_on(stepped, bounds, part, equal).wait()
            work = self._gather_evenly(buffer, part)
        self.bytes_sent += self._bytes_away(stepped, bounds, equal)
        return Transfers([work], buffer, part)

    def _gather_evenly(self, buffer: Tensor, part: Tensor) -> Work:
        self.bytes_sent += buffer.nbytes - part.nbytes
        group = existing(self._mates_group)
        return _all_gather_single(real_view(buffer), real_view(part), group=group, async_op=True)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Within it, waits are made beside the caller's stream, after the work that it has queued."""
        streams = Streams(device)
        launching = streams.current()
        self._side = self._side or streams.another()
        with streams.on(self._side):
            streams.wait_for(launching)
            yield

    def _pass_on(self, source: Tensor, had: Sequence[int], target: Tensor, wanted: Sequence[int]) -> Work:
        """Sends this rank's part by ``had`` to the ranks that need it by ``wanted``, and receives their parts."""
        shard, width = self.place.shard, 2 if source.is_complex() else 1
        received = [width * size for size in _sizes_by_rank(had, wanted[shard], wanted[shard + 1])]
        sent = [width * size for size in _sizes_by_rank(wanted, had[shard], had[shard + 1])]
        group = existing(self._mates_group)
        # Both are parts of one buffer, in its order, and so are the messages: nothing need be sorted.
        return _all_to_all(real_view(target), real_view(source), received, sent, group=group, async_op=True)

    def _bytes_away(self, source: Tensor, had: Sequence[int], wanted: Sequence[int]) -> int:
        own = self.place.shard
        stay = max(0, min(had[own + 1], wanted[own + 1]) - max(had[own], wanted[own]))
        return source.nbytes - stay * source.element_size()


def _sizes_by_rank(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """How many of the elements ``[start, stop)`` are in each shard, by its number: the argument of an all-to-all."""
    sizes = [0] * (len(bounds) - 1)
    for part in parts_of(bounds, start, stop):
        sizes[part.shard] = part.numel
    return sizes


Carry = Callable[..., Work]

# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single: Carry = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single: Carry = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all: Carry = dist.all_to_all_single
"""torch's collectives of single tensors, which return a handle if they are asynchronous."""
