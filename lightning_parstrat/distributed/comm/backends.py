"""Which collectives suit a process group and a device: torch's own, chunks that the ranks exchange, or none."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.exchange import ChunkTransfer, PairwiseCollectives, SummedChunks
from lightning_parstrat.distributed.comm.grouped import GroupedExchange, GroupedNativeCollectives
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.comm.streams import streams_of
from lightning_parstrat.distributed.comm.two_level import TwoLevelCollectives
from lightning_parstrat.distributed.comm.work import DONE, Transfers, Work, as_work


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
    """
    if dist.get_world_size(group) == 1:
        return LocalCollectives(group)
    if shard_groups is not None and shard_groups.copies > 1:
        if device.type != "cpu":
            return _grouped_native(group, device, topology, shard_groups)
        return GroupedExchange(group, topology, shard_groups)
    if device.type != "cpu":
        return NativeCollectives(group, topology)
    if topology is not None and topology.has_two_levels:
        return TwoLevelCollectives(group, topology)
    return PairwiseCollectives(group, topology)


def _grouped_native(
    group: dist.ProcessGroup, device: torch.device, topology: Topology | None, groups: ShardGroups
) -> GroupedNativeCollectives:
    rank = dist.get_rank(group)
    # Where every rank has a copy of its own, nothing is left to do within.
    within: Collectives = LocalCollectives(group)
    if groups.size > 1:
        kind = WideningCollectives if groups.rings_carry_more(topology) else NativeCollectives
        within = kind(subgroup(group, groups.mates(rank)))

    def between() -> Collectives:
        return NativeCollectives(subgroup(group, groups.holders(rank)))

    return GroupedNativeCollectives(group, topology, groups, within, between, streams_of(device))


class LocalCollectives(Collectives):
    """World size 1: the ordinary path, with nothing to send."""

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        # A copy, as with more ranks: the buffer is free for reuse afterwards, and the shard's dtype may be wider.
        shard.copy_(buffer)
        return DONE

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        return DONE


class NativeCollectives(PairwiseCollectives):
    """torch's own collectives where all parts are equal, as NCCL requires; otherwise the ranks exchange chunks.

    Gradients that are summed in a wider dtype than they travel in take an all-to-all, of as many bytes as the
    reduce-scatter, and a local sum: until then there is one more buffer of the bucket's size.
    """

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        # A range means equal parts (see `BucketLayout`), the only ones that torch's single-tensor collectives take.
        if not isinstance(bounds, range):
            return super()._reduce_scatter(buffer, shard, bounds)
        self.traffic.reduce_scatter_bytes += buffer.nbytes - shard.numel() * buffer.element_size()
        if shard.dtype != buffer.dtype:
            return self._exchange_and_sum(buffer, shard)
        work = _reduce_scatter_single(real_view(shard), real_view(buffer), group=self.group, async_op=True)
        return as_work(work)

    @override
    def _start(self, transfers: Sequence[ChunkTransfer], tag: int) -> list[Work]:
        # NCCL must be told of all at once: one after the other, they could wait for each other.
        operations = [
            dist.P2POp(dist.isend if sends else dist.irecv, chunk, group=self.group, group_peer=peer, tag=tag)
            for sends, chunk, peer in transfers
        ]
        return [as_work(work) for work in dist.batch_isend_irecv(operations)] if operations else []

    def _exchange_and_sum(self, buffer: Tensor, shard: Tensor) -> Work:
        """A sum in a wider dtype than what travels; a reduce-scatter would round partial sums at every rank."""
        received = torch.empty_like(buffer)
        work = dist.all_to_all_single(real_view(received), real_view(buffer), group=self.group, async_op=True)
        by_rank = list(received.view(self.world_size, -1))
        return SummedChunks(Transfers([as_work(work)], buffer, received), by_rank, shard)

    @override
    def _all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Work:
        if not isinstance(bounds, range):
            return super()._all_gather(buffer, bounds)
        self.traffic.all_gather_bytes += buffer.nbytes - buffer.nbytes // self.world_size
        unsharded = real_view(buffer)
        # In place: where its input lies at this rank's part of the output, NCCL copies nothing.
        own = unsharded.view(self.world_size, -1)[self.rank]
        return as_work(_all_gather_single(unsharded, own, group=self.group, async_op=True))


class WideningCollectives(NativeCollectives):
    """Gradients that are summed in a wider dtype than they are in are widened first, and summed around a ring.

    An all-to-all sends most of what a rank has over its own network interface, a ring each byte over one interface of a
    node's: twice the bytes take less time there. Until it is done there is one more buffer of the wider bucket's size.
    """

    widens = True

    @override
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Sequence[int]) -> Work:
        if shard.dtype != buffer.dtype and isinstance(bounds, range):
            buffer = buffer.to(shard.dtype)
        return super()._reduce_scatter(buffer, shard, bounds)


# torch 2.13 renamed the two collectives of single tensors and deprecated the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
