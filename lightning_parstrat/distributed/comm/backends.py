"""Which collectives suit a process group and a device: torch's own, chunks that the ranks exchange, or none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.layout import even_bounds
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.grouped import GroupedExchange, GroupedNativeCollectives
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.comm.streams import streams_of
from lightning_parstrat.distributed.comm.two_level import TwoLevelCollectives
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives, sizes_by_rank
from lightning_parstrat.distributed.comm.work import DONE, Followed, Transfers, Work, as_work

MOST_BY_PAIRS = 16
"""Of more CPU ranks, a message for each pair would be too many: Gloo's own collectives go around a ring."""


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology | None = None,
    shard_groups: ShardGroups | None = None,
) -> Collectives:
    """The collectives that suit the group's size, its ranks' nodes, and the device the tensors live on.

    Not collective, but for several shard groups on a GPU, which have process groups of their own.

    Args:
        group: The process group.
        device: Where the tensors are.
        topology: Which ranks share a node; by default all do.
        shard_groups: Which ranks share a copy of what is sharded; by default all do.

    Raises:
        ValueError: The group sends what lies on the host, and the tensors do not.
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
        return UnevenCollectives(GroupedExchange(group, shard_groups))
    if device.type != "cpu":
        return _native(shard_groups or ShardGroups.of_all(dist.get_world_size(group)), topology)(group)
    if dist.get_world_size(group) > MOST_BY_PAIRS:
        return UnevenCollectives(WideningCollectives(group))
    if topology is not None and topology.has_two_levels:
        return UnevenCollectives(TwoLevelCollectives(group, topology))
    return UnevenCollectives(PairwiseCollectives(group))


def _native(groups: ShardGroups, topology: Topology | None) -> "type[NativeCollectives]":
    return WideningCollectives if groups.rings_carry_more(topology) else NativeCollectives


def _grouped_native(
    group: dist.ProcessGroup, device: torch.device, topology: Topology | None, groups: ShardGroups
) -> GroupedNativeCollectives:
    rank = dist.get_rank(group)
    # Where every rank has a copy of its own, nothing is left to do within.
    within: Collectives = LocalCollectives(group)
    if groups.size > 1:
        within = _native(groups, topology)(subgroup(group, groups.mates(rank)))

    def between() -> Collectives:
        return NativeCollectives(subgroup(group, groups.holders(rank)))

    return GroupedNativeCollectives(group, groups, within, between, streams_of(device))


class LocalCollectives(Collectives):
    """World size 1: nothing to send. A sum may stay where it is."""

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
    """torch's own collectives, of equal parts, as NCCL requires; an all-to-all brings unequal parts to their owners.

    Gradients that are summed in a wider dtype than they travel in take an all-to-all, of as many bytes as the
    reduce-scatter, and a local sum: until then there is one more buffer of the bucket's size. How unequal parts
    travel, and what that costs, is described in ``uneven.py``: by two collectives. A stream of their own waits for the
    first, so that neither the host nor the caller's stream does.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._side: Any = None

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        # A range means equal parts (see `BucketLayout`), the only ones that torch's single-tensor collectives take.
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
            return self._exchange_and_sum(buffer, shard)
        work = _reduce_scatter_single(real_view(shard), real_view(buffer), group=self.group, async_op=True)
        return as_work(work)

    def _exchange_and_sum(self, buffer: Tensor, shard: Tensor) -> Work:
        """A sum in a wider dtype than what travels; a reduce-scatter would round partial sums at every rank."""
        received = torch.empty_like(buffer)
        work = dist.all_to_all_single(real_view(received), real_view(buffer), group=self.group, async_op=True)
        by_rank = received.view(self.world_size, -1)
        return Followed(Transfers([as_work(work)], buffer), lambda: torch.sum(by_rank, 0, dtype=shard.dtype, out=shard))

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if isinstance(bounds, range):
            # In place: where its input lies at this rank's part of the output, NCCL copies nothing.
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
        """Within it, what is waited for is waited for beside the caller's stream, after what that has queued."""
        streams = streams_of(device)
        launching = streams.current()
        self._side = self._side or streams.another()
        with streams.on(self._side):
            streams.wait_for(launching)
            yield

    def _pass_on(self, source: Tensor, had: Sequence[int], target: Tensor, wanted: Sequence[int]) -> Work:
        """Brings what this rank has by the bounds ``had`` to those who want it by ``wanted``, and theirs here."""
        rank, width = self.rank, 2 if source.is_complex() else 1
        received = [width * size for size in sizes_by_rank(had, wanted[rank], wanted[rank + 1])]
        sent = [width * size for size in sizes_by_rank(wanted, had[rank], had[rank + 1])]
        group = self.group
        # Both are parts of one buffer, in its order, and so are the messages: nothing need be sorted.
        work = dist.all_to_all_single(real_view(target), real_view(source), received, sent, group=group, async_op=True)
        return as_work(work)

    def _bytes_away(self, source: Tensor, had: Sequence[int], wanted: Sequence[int]) -> int:
        stay = max(0, min(had[self.rank + 1], wanted[self.rank + 1]) - max(had[self.rank], wanted[self.rank]))
        return source.nbytes - stay * source.element_size()


class WideningCollectives(NativeCollectives):
    """Gradients that are summed in a wider dtype than they are in are widened first, and summed around a ring.

    An all-to-all sends most of what a rank has over its own network interface, a ring each byte over one interface of a
    node's: twice the bytes take less time there. Until it is done there is one more buffer of the wider bucket's size.
    Between many CPU ranks an all-to-all would be a message to each.
    """

    widens = True

    @override
    def _reduce_scatter_evenly(self, buffer: Tensor, shard: Tensor) -> Work:
        return super()._reduce_scatter_evenly(buffer.to(shard.dtype), shard)


# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
