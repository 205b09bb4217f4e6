"""Parameters that travel together: they live in one flat buffer, as views that keep their strides.

So a bucket's shards can be all-gathered in place, and each rank's optimizer steps a view of its own shard.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_parstrat.core.layout import BucketLayout
from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.distributed.torch_compat import users_of_storage
from lightning_parstrat.distributed.zero1.gradient_bucket import GradientBucket, ParameterSlot


class WireFormat(NamedTuple):
    """What a bucket's gradients and parameters travel in, and its shard is kept in; None for the parameters' dtype."""

    reduce_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None


class ParameterBucket(GradientBucket):
    """Parameters that live in one flat buffer, of which each rank owns and steps a shard.

    Creating it moves the parameters' storage: while it runs, the bucket's parameters exist twice, so that setting up
    many buckets one after the other peaks at one bucket. Not collective.

    Args:
        index: Position in the order of reductions.
        layout: The plan; its slots refer to positions in ``parameters``.
        parameters: All parameters of the plan.
        place: Which shard is this process's, and of which copy.
        wire: What gradients and parameters travel in, and what this rank's shard is kept in.
    """

    is_replicated = False

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        place: ShardPlace,
        wire: WireFormat | None = None,
    ) -> None:
        wire = wire or WireFormat()
        super().__init__(index, layout, parameters, place, wire.reduce_dtype)
        self.gather_dtype = wire.gather_dtype or self.dtype
        # Padding travels with the rest: as zeros, not as what the memory held before.
        self.flat = torch.zeros(layout.numel, dtype=self.dtype, device=self.device)
        self.parameters: list[Tensor] = [slot.parameter for slot in self.slots]
        self._left_behind: set[int] = set()
        self._has_rebound = False
        self._move_in(self.slots)
        self.master = None if wire.master_dtype is None else self.shard.to(wire.master_dtype, copy=True)
        stepped = self.shard if self.master is None else self.master
        for slot in self.slots:
            if slot.shard_slice is not None:
                slot.shard = nn.Parameter(slot.view_into_shard(stepped))
        self._own_users = self._users_of_buffer(self.slots)

    @property
    @override
    def shard_dtype(self) -> torch.dtype:
        return self.dtype if self.master is None else self.master.dtype

    @property
    @override
    def has_master_weights(self) -> bool:
        return self.master is not None

    @property
    def shard(self) -> Tensor:
        """This rank's part of the flat buffer: 1-D, a view."""
        return self.shard_of(self.flat)

    @property
    def is_read_through_parameters(self) -> bool:
        """Whether nothing but the parameters themselves shows what is in the buffer: no view, detached or other."""
        return not self._has_rebound and users_of_storage(self.flat) <= self._own_users

    @property
    def storages(self) -> set[int]:
        """Addresses of the buffer, and of those it has left to others: a view of one brings all of it along."""
        return self._left_behind | {self.flat.untyped_storage().data_ptr()}

    def copy_in_rebound(self) -> None:
        """Copies in what users have put in the place of parameters' data: other tensors, which stay theirs.

        The tensor goes on being the parameter's storage, as under DDP where its user may hold on to it; the bucket
        works on a copy of it from then on. And the memory that the parameter had in the bucket is left to whoever
        holds it now (two parameters may have swapped data): the bucket moves.

        Raises:
            ValueError: A parameter has changed its shape, dtype or device since the plan was made.
        """
        rebound = self._lying_elsewhere()
        if not rebound:
            return
        self._check_unchanged(rebound)
        self._has_rebound = True
        with torch.no_grad():
            if not all(slot.is_rebound for slot in rebound):
                self._leave_memory_that_others_hold(rebound)
            for slot in rebound:
                slot.is_rebound = True
                slot.view_into(self.flat).copy_(slot.parameter.data)

    @torch.no_grad()
    def _copy_out_rebound(self) -> None:
        for slot in self.slots:
            if slot.is_rebound:
                slot.parameter.data.copy_(slot.view_into(self.flat))

    @torch.no_grad()
    def _move_in(self, slots: Sequence[ParameterSlot]) -> None:
        for slot in slots:
            if slot.place.numel:
                view = slot.view_into(self.flat)
                view.copy_(slot.parameter.data)
                slot.parameter.data = view

    def _lying_elsewhere(self) -> list[ParameterSlot]:
        """Those whose parameter has elements, and has them outside of the buffer, or in another order."""
        start, width, dtype = self.flat.data_ptr(), self.flat.element_size(), self.dtype
        return [
            slot
            for slot, parameter in zip(self.slots, self.parameters, strict=True)
            if slot.place.numel
            and (
                parameter.data_ptr() != start + slot.place.offset * width
                or parameter.stride() != slot.strides
                or parameter.dtype != dtype
            )
        ]

    def _check_unchanged(self, slots: Sequence[ParameterSlot]) -> None:
        for slot in slots:
            data = slot.parameter.data
            if data.numel() != slot.place.numel or data.dtype != self.dtype or data.device != self.device:
                raise ValueError(
                    f"A parameter had {slot.place.numel} elements of {self.dtype} on {self.device} when"
                    f" training began and has {data.numel()} of {data.dtype} on {data.device} now. Convert the module"
                    " before `fit`, not during it."
                )

    def _leave_memory_that_others_hold(self, rebound: Sequence[ParameterSlot]) -> None:
        """Moves to a new buffer where other tensors lie in this one than the parameters ``in_place`` and the shards."""
        in_place = [slot for slot in self.slots if slot not in rebound]
        # Only the storage knows of views: a detached tensor or one in a user's list leaves no other trace.
        if users_of_storage(self.flat) <= self._users_of_buffer(in_place):
            return
        # Whoever holds a view keeps the old memory, as under DDP; what is saved of it must still be cut out.
        self._left_behind.add(self.flat.untyped_storage().data_ptr())
        self.flat = self.flat.clone()
        self._move_in(in_place)
        if self.master is None:
            for slot in self.slots:
                if slot.shard is not None:
                    slot.shard.data = slot.view_into_shard(self.shard)

    def _users_of_buffer(self, in_place: Sequence[ParameterSlot]) -> int:
        """How many tensors lie in the buffer where there are none but the parameters ``in_place`` and the shards."""
        shards = 0 if self.master is not None else sum(slot.shard is not None for slot in self.slots)
        # The buffer itself, and the handle that is made to ask.
        return 2 + sum(slot.place.numel > 0 for slot in in_place) + shards

    @torch.no_grad()
    def move_out(self, storages: Collection[int]) -> None:
        """Gives parameters storage of their own again, and frees the bucket's when no parameter is left in it.

        Shards keep only their shapes, but for master weights: they belong to what a checkpoint saves.

        Args:
            storages: Addresses of those that parameters leave: all buckets', as they may have traded data.
        """
        for slot in self.slots:
            if slot.parameter.data.untyped_storage().data_ptr() in storages:
                slot.parameter.data = slot.parameter.data.clone()
            if slot.shard is not None:
                slot.shard.grad = None
                if self.master is None:
                    # One element, expanded: the optimizer's state is filed by shards of the right shape.
                    slot.shard.data = self.flat.new_zeros(()).expand(slot.shard.shape)
        self.shard_gradient = self.unsharded_gradient = None
        self.flat = self.flat.new_empty(0)

    # Not `@torch.no_grad()`: that is ten calls, in every step, also where there is nothing to do.

    def refresh_master_weights(self) -> None:
        """Takes over what was written into the parameters since the last step: clamped, swapped or loaded weights."""
        if self.master is not None:
            with torch.no_grad():
                take_where_changed(self.master, self.shard, self._rounded(self.master))

    def publish_master_weights(self) -> None:
        """Rounds the stepped master weights into the parameters."""
        if self.master is not None:
            with torch.no_grad():
                self.shard.copy_(self._rounded(self.master))

    def parameters_to_send(self) -> Tensor:
        """The buffer to gather in, of which this rank's part is filled: the parameters' own, or a narrow one."""
        if self.gather_dtype == self.dtype:
            return self.flat
        buffer = self.flat.new_empty(self.layout.numel, dtype=self.gather_dtype)
        with torch.no_grad():
            self.shard_of(buffer).copy_(self.shard)
        return buffer

    def finish_gather(self, gathered: Tensor) -> None:
        """Puts what was gathered where the parameters are, and where they have storage outside of the bucket."""
        if gathered is not self.flat:
            with torch.no_grad():
                self.flat.copy_(gathered)
        if self._has_rebound:
            self._copy_out_rebound()

    def _rounded(self, master: Tensor) -> Tensor:
        return master.to(self.gather_dtype).to(self.dtype)

    @override
    def attach_exposed_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` its part of ``param.grad``, as its user has left it."""
        for slot in self.slots:
            if slot.shard is not None:
                gradient = slot.parameter.grad
                slot.shard.grad = None if gradient is None else slot.part_of(gradient).to(self.shard_dtype)

    @override
    def attach_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` a view of the reduced gradient.

        It is None where no rank had one, and while micro-batches are being added up.
        """
        for slot in self.slots:
            if slot.shard is None:
                continue
            if self.shard_gradient is None or self.is_partial or not slot.used:
                slot.shard.grad = None
            else:
                slot.shard.grad = slot.view_into_shard(self.shard_gradient)


def take_where_changed(wide: Tensor, narrow: Tensor, rounded: Tensor | None = None) -> None:
    """Writes the elements of ``narrow`` into ``wide`` that are not what ``wide`` rounds to; the others keep their bits.

    Args:
        wide: Any shape, the wider dtype.
        narrow: The same shape.
        rounded: What ``wide`` rounds to; by default to the dtype of ``narrow``.
    """
    rounded = wide.to(narrow.dtype) if rounded is None else rounded
    torch.where(rounded == narrow, wide, narrow.to(wide.dtype), out=wide)
