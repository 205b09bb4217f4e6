"""Buckets: parameters whose gradients are sent together, and what happens to their gradients.

A gradient buffer is allocated when a bucket's gradients are packed. It is freed with its reduce-scatter, and the shard
remains. A plain ``GradientBucket`` leaves the parameters in their memory. Every rank steps them (or none), and every
rank gets the mean gradient, as under DDP. A ``ParameterBucket`` keeps the parameters in one flat buffer, as views that
keep their strides. So a bucket's shards can be all-gathered in place, and each rank's optimizer steps a view of its
shard.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_parstrat.core.layout import BucketLayout, ShardSlice, Slot
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.core.tensor_trees import in_storage_order
from lightning_parstrat.distributed.torch_compat import copy_all, users_of_storage


@dataclass(slots=True, eq=False, repr=False)
class ParameterSlot:
    """One parameter's place in its bucket, and the state of its gradient.

    Attributes:
        parameter: The user's parameter, whose data is a view into the bucket.
        bucket: The bucket that contains the parameter.
        place: The parameter's place in the bucket.
        strides: Its strides in the bucket. A dense parameter keeps its strides (channels_last is kept), any other is
            row-major.
        shard_slice: The part of the parameter that this rank owns, maybe without elements.
        shard: That part as a parameter for the optimizer, or None.
        expected: Whether the next bucket launch waits for the parameter's gradient.
        fresh: Whether autograd has accumulated into ``param.grad`` since the gradient was last packed.
        arrived: Whether this rank had a gradient for the parameter in the current backward.
        reduced: Whether any rank had a gradient for it in the last backward that was reduced.
        used: Whether any rank has had a gradient for it since gradients were zeroed.
        trainable: Whether the parameter required a gradient when the last backward began.
        idle_backwards: In how many backwards in a row it was trainable, but no rank had a gradient for it.
    """

    parameter: Tensor
    bucket: "GradientBucket"
    place: Slot
    strides: tuple[int, ...] = field(init=False)
    shard_slice: ShardSlice = field(init=False)
    shard: nn.Parameter | None = None
    expected: bool = False
    fresh: bool = False
    arrived: bool = False
    reduced: bool = False
    used: bool = False
    trainable: bool = False
    idle_backwards: int = 0

    def __post_init__(self) -> None:
        # empty_like keeps the strides of dense tensors (channels_last) and makes all others row-major, as torch does.
        self.strides = torch.empty_like(self.parameter, device="meta").stride()
        self.shard_slice = self.bucket.layout.slice_of(self.place, self.bucket.place.shard)

    @property
    def has_master_weights(self) -> bool:
        """Whether this rank steps a copy of the parameter that is kept in fp32."""
        return self.shard is not None and self.bucket.master is not None

    def view_into(self, flat: Tensor) -> Tensor:
        """This parameter's place in a buffer of the bucket's length, in the parameter's shape and strides."""
        return flat.as_strided(self.parameter.shape, self.strides, flat.storage_offset() + self.place.offset)

    def view_into_shard(self, flat_shard: Tensor) -> Tensor:
        """The part this rank owns, in a buffer of the shard's length: 1-D, or the uncut parameter in its shape."""
        start = flat_shard.storage_offset() + self.shard_slice.shard_start
        if self.shard_slice.numel == self.place.numel:
            # An optimizer that depends on shapes (Muon, Adafactor) must see the parameter's own shape.
            return flat_shard.as_strided(self.parameter.shape, self.strides, start)
        return flat_shard.as_strided((self.shard_slice.numel,), (1,), start)

    def storage_order(self, unsharded: Tensor) -> Tensor:
        """A tensor of the parameter's shape as 1-D, with its elements in the order of the bucket."""
        return in_storage_order(unsharded, self.strides)

    def part_of(self, unsharded: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's shape: a view, if its strides are the bucket's."""
        part = self.storage_order(unsharded)[self.shard_slice.elements]
        is_uncut = self.shard_slice.numel == self.place.numel
        return part.as_strided(self.parameter.shape, self.strides) if is_uncut else part


class GradientBucket:
    """Parameters whose gradients are sent together. The parameters themselves stay in their memory.

    Args:
        index: Position in the order of reductions.
        layout: The plan. Its slots refer to positions in ``parameters``.
        parameters: All parameters of the plan, at least one of which is in this bucket.
        place: Which shard of the gradient belongs to this process.
        policy: The dtypes in which gradients and parameters are sent and stepped.
    """

    is_replicated = True
    """Whether every rank steps all of every parameter. ``param.grad`` must then hold the mean on all of them."""

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        place: ShardPlace,
        policy: ShardingPolicy,
    ) -> None:
        self.index = index
        self.layout = layout
        self.place = place
        self.numel, self.shard_numel = layout.numel, layout.shard_numel(place.shard)
        first = parameters[layout.slots[0].parameter]
        self.dtype = first.dtype
        self.device = first.device
        self.comm_dtype = policy.reduced_in(first.dtype)
        self.slots = [ParameterSlot(parameters[place.parameter], self, place) for place in layout.slots]
        self.master: Tensor | None = None
        """The copy of the shard that this rank steps instead of the parameters."""
        self.shard_gradient: Tensor | None = None
        self.unsharded_gradient: Tensor | None = None
        self.is_partial = False
        """Whether ``shard_gradient`` is a sum to which more micro-batches of the same window will be added."""

    @property
    def has_gradients(self) -> bool:
        """Whether any rank had a gradient for any of the bucket's parameters. The answer is the same on all ranks."""
        return True in [slot.used for slot in self.slots]

    @property
    def shard_dtype(self) -> torch.dtype:
        """The dtype of the shard's gradient, and so of its optimizer state."""
        return self.dtype if self.master is None else self.master.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which micro-batches are added up. A 16-bit sum would lose many small numbers."""
        narrow = self.shard_dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if narrow else self.shard_dtype

    def shard_of(self, unsharded: Tensor) -> Tensor:
        """This rank's part of a buffer of the bucket's length: 1-D, a view."""
        shard = self.place.shard
        return unsharded[self.layout.bounds[shard] : self.layout.bounds[shard + 1]]

    def pack_gradients(self, exposes: bool, again: bool) -> Tensor:
        """Moves the local gradients into a new flat buffer. ``param.grad`` is None afterwards.

        Args:
            exposes: Whether gradients are exposed, so that ``param.grad`` may hold the mean of an earlier backward. The
                mean is packed, because another rank may have accumulated into it since. It stays, as none may have.
            again: Whether that was packed in this backward already. Then only what came since is packed.

        Returns:
            1-D, ``layout.numel`` elements of ``comm_dtype``. Elements without a gradient are zero.

        Raises:
            ValueError: A gradient is sparse.
        """
        buffer = torch.empty(self.numel, dtype=self.comm_dtype, device=self.device)
        places, gradients = [], []
        for slot in self.slots:
            earlier, slot.fresh = exposes and not slot.fresh, False
            gradient = None if earlier and again else slot.parameter.grad
            if gradient is None:
                slot.view_into(buffer).zero_()
                continue
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"A parameter of shape {tuple(gradient.shape)} got a sparse gradient ({gradient.layout});"
                    " only dense gradients can be sharded. Use `sparse=False` in its nn.Embedding or nn.EmbeddingBag."
                )
            if not earlier:
                slot.arrived = True
                # Frees autograd's tensor: without accumulation gradients cost a shard, not a copy of the model.
                slot.parameter.grad = None
            places.append(buffer.as_strided(gradient.shape, slot.strides, slot.place.offset))
            gradients.append(gradient)
        if places:
            # One kernel for all: a bucket may have hundreds of small tensors.
            copy_all(places, gradients)
        return buffer

    def attach_exposed_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` its part of ``param.grad``, with the user's changes."""
        for slot in self.slots:
            if slot.shard is not None:
                gradient = slot.parameter.grad
                slot.shard.grad = None if gradient is None else slot.part_of(gradient).to(self.shard_dtype)

    def attach_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` a view of the reduced gradient.

        If no rank had a gradient, ``.grad`` is None. It is also None while micro-batches are being added up.
        """
        for slot in self.slots:
            if slot.shard is None:
                continue
            if self.shard_gradient is None or self.is_partial or not slot.used:
                slot.shard.grad = None
            else:
                slot.shard.grad = slot.view_into_shard(self.shard_gradient)

    @torch.no_grad()
    def end_partial_sum(self, factor: float) -> None:
        """Multiplies the complete sum of micro-batches, and gives the result to the owners of shards."""
        if not self.is_partial:
            # The sum was zeroed.
            return
        self.is_partial = False
        if self.shard_gradient is not None:
            if factor != 1.0:
                self.shard_gradient.mul_(factor)
            self.shard_gradient = self.shard_gradient.to(self.shard_dtype)
        self.attach_gradients()

    def zero_gradients(self, slots: Collection[ParameterSlot], set_to_none: bool = True) -> None:
        """Drops the reduced gradients of ``slots``, or fills them with zeros."""
        mine = [slot for slot in self.slots if slot in slots]
        if set_to_none and len(mine) == len(self.slots):
            self.shard_gradient = self.unsharded_gradient = None
            self.is_partial = False
        for slot in mine:
            if self.shard_gradient is not None and slot.shard_slice.numel:
                slot.view_into_shard(self.shard_gradient).zero_()
            if set_to_none:
                slot.used = False
                if slot.shard is not None:
                    slot.shard.grad = None


class ParameterBucket(GradientBucket):
    """Parameters in one flat buffer, of which each rank owns and steps a shard.

    The constructor moves the parameters' storage. Meanwhile the bucket's parameters exist twice. Many buckets, one
    after the other, therefore peak at one bucket more. Not collective.

    Args:
        index: See :class:`GradientBucket`.
        layout: The plan.
        parameters: The parameters.
        place: The shard.
        policy: The dtypes.
    """

    is_replicated = False

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        place: ShardPlace,
        policy: ShardingPolicy,
    ) -> None:
        super().__init__(index, layout, parameters, place, policy)
        self.gather_dtype, master_dtype = policy.gathered_in(self.dtype), policy.master_dtype(self.dtype)
        # Padding is sent with the parameters: as zeros, not as uninitialized memory.
        self.flat = torch.zeros(layout.numel, dtype=self.dtype, device=self.device)
        self.parameters: list[Tensor] = [slot.parameter for slot in self.slots]
        self._first_storage = self.flat.untyped_storage().data_ptr()
        self._has_copies = False
        self._move_in()
        if master_dtype is not None:
            self.master = self.shard.to(master_dtype, copy=True)
        for slot in self.slots:
            if slot.shard_slice.numel:
                slot.shard = nn.Parameter(slot.view_into_shard(self.stepped))
                # What a program sets on a parameter, now or later, an optimizer may read.
                slot.shard.__dict__ = vars(slot.parameter)
        # Parameters, shards and the bucket itself.
        self._own_users = users_of_storage(self.flat)

    @property
    def shard(self) -> Tensor:
        """This rank's part of the flat buffer: 1-D, a view."""
        return self.shard_of(self.flat)

    @property
    def is_read_through_parameters(self) -> bool:
        """Whether only the parameters themselves show the buffer's content: no view, detached or other.

        The parameters must also allow marking. A parameter of a subclass may have another ``__torch_function__``.
        """
        if self._has_copies or not {nn.Parameter}.issuperset(map(type, self.parameters)):
            return False
        return users_of_storage(self.flat) <= self._own_users

    @property
    def stepped(self) -> Tensor:
        """The part that this rank's optimizer steps, 1-D."""
        return self.shard if self.master is None else self.master

    @property
    def has_own_master(self) -> bool:
        """Whether master weights have more than the shard, from which they are made at first."""
        return self.master is not None and not torch.equal(self.master, self.shard.to(self.master.dtype))

    @property
    def storages(self) -> set[int]:
        """Addresses of the buffer, and of the one that parameters had before it. A view of one keeps all of it."""
        return {self._first_storage, self.flat.untyped_storage().data_ptr()}

    # Not `@torch.no_grad()`: that is ten calls in every step, even if there is nothing to do.

    def take_over_changes(self) -> None:
        """Takes over changes to parameters since the last step: clamped, swapped, loaded or rebound weights.

        Tensors that users have set as parameters' data are copied in. The tensors remain the users'.
        Such a tensor stays the parameter's storage, as under DDP: its user may hold it. Other tensors may still use the
        memory that the parameter had in the bucket: two parameters may have swapped data. So from then on all
        parameters keep the memory that they have, and the bucket works on copies of them in a new buffer.

        Raises:
            ValueError: A parameter has changed its shape, dtype or device since the plan was made.
        """
        if self._has_copies or self._lying_elsewhere():
            self._copy_in()
        if self.master is not None:
            with torch.no_grad():
                take_where_changed(self.master, self.shard, self._rounded(self.master))

    @torch.no_grad()
    def _move_in(self) -> None:
        for slot in self.slots:
            if slot.place.numel:
                view = slot.view_into(self.flat)
                view.copy_(slot.parameter.data)
                slot.parameter.data = view

    @torch.no_grad()
    def _copy_in(self) -> None:
        for slot in self.slots:
            data = slot.parameter.data
            if data.numel() != slot.place.numel or data.dtype != self.dtype or data.device != self.device:
                raise ValueError(
                    f"A parameter had {slot.place.numel} elements of {self.dtype} on {self.device} when"
                    f" training began and has {data.numel()} of {data.dtype} on {data.device} now. Convert the module"
                    " before `fit`, not during it."
                )
        if not self._has_copies:
            self._has_copies = True
            self.flat = self.flat.clone()
            for slot in self.slots if self.master is None else ():
                if slot.shard is not None:
                    slot.shard.data = slot.view_into_shard(self.shard)
        for slot in self.slots:
            slot.view_into(self.flat).copy_(slot.parameter.data)

    def _lying_elsewhere(self) -> bool:
        """Whether a parameter with elements lies outside of the buffer, or in another order."""
        start, width, dtype = self.flat.data_ptr(), self.flat.element_size(), self.dtype
        return any(
            slot.place.numel
            and (
                slot.parameter.data_ptr() != start + slot.place.offset * width
                or slot.parameter.stride() != slot.strides
                or slot.parameter.dtype != dtype
            )
            for slot in self.slots
        )

    @torch.no_grad()
    def move_out(self, storages: Collection[int]) -> None:
        """Gives parameters separate storage again, and frees the bucket's storage if no parameter is left in it.

        Shards keep only their shapes. Master weights stay: they belong to what a checkpoint saves.

        Args:
            storages: Addresses of the storages that parameters leave. Pass those of all buckets, as parameters may have
                traded data.
        """
        for slot in self.slots:
            if slot.parameter.data.untyped_storage().data_ptr() in storages:
                slot.parameter.data = slot.parameter.data.clone()
            if slot.shard is not None:
                slot.shard.grad = None
                if self.master is None:
                    # One element, expanded: the keys of the optimizer's state are shards of the right shape.
                    slot.shard.data = self.flat.new_zeros(()).expand(slot.shard.shape)
        self.shard_gradient = self.unsharded_gradient = None
        self.flat = self.flat.new_empty(0)

    def parameters_to_send(self) -> Tensor:
        """The buffer of the all-gather, with this rank's stepped part: the parameters' buffer, or a narrow one."""
        if self.master is not None:
            with torch.no_grad():
                self.shard.copy_(self._rounded(self.master))
        if self.gather_dtype == self.dtype:
            return self.flat
        buffer = self.flat.new_empty(self.layout.numel, dtype=self.gather_dtype)
        with torch.no_grad():
            self.shard_of(buffer).copy_(self.shard)
        return buffer

    def finish_gather(self, gathered: Tensor) -> None:
        """Copies gathered values to the parameters, also to parameters with storage outside of the bucket."""
        if gathered is self.flat and not self._has_copies:
            return
        with torch.no_grad():
            self.flat.copy_(gathered)
            for slot in self.slots if self._has_copies else ():
                slot.parameter.data.copy_(slot.view_into(self.flat))

    def _rounded(self, master: Tensor) -> Tensor:
        return master.to(self.gather_dtype).to(self.dtype)


def take_where_changed(wide: Tensor, narrow: Tensor, rounded: Tensor | None = None) -> None:
    """Writes elements of ``narrow`` into ``wide`` if ``wide`` does not round to them. Other elements keep their bits.

    Args:
        wide: Any shape, the wider dtype.
        narrow: The same shape.
        rounded: The rounded values of ``wide``. By default, ``wide`` in the dtype of ``narrow``.
    """
    rounded = wide.to(narrow.dtype) if rounded is None else rounded
    torch.where(rounded == narrow, wide, narrow.to(wide.dtype), out=wide)
