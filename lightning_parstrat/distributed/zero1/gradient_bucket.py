"""Gradients that travel together: one parameter's place in a bucket, and the life of the bucket's gradients.

A gradient buffer is allocated when a bucket's gradients are packed and freed with its reduce-scatter; what remains is
the shard. In a plain ``GradientBucket`` the parameters stay where they are, every rank steps them (or none), and the
mean gradient is shown to all, as under DDP; in a ``ParameterBucket`` (``parameter_bucket.py``) they live in one buffer.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_parstrat.core.layout import BucketLayout, ShardSlice, Slot
from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.distributed.torch_compat import copy_all


@dataclass(slots=True, eq=False, repr=False)
class ParameterSlot:
    """One parameter's place in its bucket, and what is known of its gradient.

    Attributes:
        parameter: The user's parameter, whose data is a view into the bucket.
        bucket: The bucket it lies in.
        place: Where it lies.
        strides: The strides it has there: its own where it is dense (channels_last is kept), else row-major.
        shard_slice: Which part of it this rank owns, or None.
        shard: That part as a parameter for the optimizer, or None.
        expected: Whether the next bucket launch waits for its gradient.
        fresh: Whether autograd has accumulated into ``param.grad`` since it was last packed.
        arrived: Whether this rank had a gradient for it in the current backward.
        reduced: Whether any rank had a gradient for it in the last backward that was reduced.
        used: Whether any rank has had a gradient for it since gradients were zeroed.
        is_rebound: Whether its user has given it other data, of which the bucket holds a copy.
        trainable: Whether it required a gradient when the last backward began.
        idle_backwards: In how many backwards in a row no rank had a gradient for it though it was trainable.
    """

    parameter: Tensor
    bucket: "GradientBucket"
    place: Slot
    strides: tuple[int, ...] = field(init=False)
    shard_slice: ShardSlice | None = field(init=False)
    shard: nn.Parameter | None = None
    expected: bool = False
    fresh: bool = False
    arrived: bool = False
    reduced: bool = False
    used: bool = False
    is_rebound: bool = False
    trainable: bool = False
    idle_backwards: int = 0

    def __post_init__(self) -> None:
        # empty_like keeps the strides of what is dense (channels_last) and makes the rest row-major, as torch does.
        self.strides = torch.empty_like(self.parameter, device="meta").stride()
        self.shard_slice = self.bucket.layout.slice_of(self.place, self.bucket.place.shard)

    @property
    def has_master_weights(self) -> bool:
        """Whether what this rank steps for it is a copy that is kept in fp32."""
        return self.shard is not None and self.bucket.has_master_weights

    def view_into(self, flat: Tensor) -> Tensor:
        """This parameter's place in a buffer of the bucket's length, in the parameter's shape and strides."""
        return flat.as_strided(self.parameter.shape, self.strides, flat.storage_offset() + self.place.offset)

    def view_into_shard(self, flat_shard: Tensor) -> Tensor:
        """The part this rank owns, in a buffer of the shard's length: 1-D, or the uncut parameter in its shape."""
        if self.shard_slice is None:
            raise AssertionError("a view of a shard was asked for on a rank that owns nothing of it")
        start = flat_shard.storage_offset() + self.shard_slice.shard_start
        if self.shard_slice.numel == self.place.numel:
            # An optimizer that looks at shapes (Muon, Adafactor) must see the parameter's own.
            return flat_shard.as_strided(self.parameter.shape, self.strides, start)
        return flat_shard.as_strided((self.shard_slice.numel,), (1,), start)

    def storage_order(self, unsharded: Tensor) -> Tensor:
        """A tensor of the parameter's shape as 1-D, its elements in the order in which they lie in the bucket."""
        if unsharded.stride() != self.strides:
            unsharded = torch.empty_strided(
                unsharded.shape, self.strides, dtype=unsharded.dtype, device=unsharded.device
            ).copy_(unsharded)
        return unsharded.as_strided((unsharded.numel(),), (1,))

    def part_of(self, unsharded: Tensor) -> Tensor:
        """The part this rank owns of a tensor of the parameter's shape: a view where its strides are the bucket's."""
        if self.shard_slice is None or self.shard is None:
            raise AssertionError("a part of a parameter was asked for on a rank that owns nothing of it")
        part = self.storage_order(unsharded)[self.shard_slice.elements]
        return part.as_strided(self.shard.shape, self.strides) if self.shard_slice.numel == self.place.numel else part

    def elements_of(self, shard: int) -> slice:
        """Which elements of it are in a shard, in storage order, wherever they lie in it; may be none."""
        shard_slice = self.bucket.layout.slice_of(self.place, shard)
        return slice(0, 0) if shard_slice is None else shard_slice.elements


class ShownMean(Enum):
    """What ``param.grad`` may hold of an earlier backward's mean, where gradients are exposed."""

    ABSENT = "gradients are not exposed: it holds what this rank has accumulated, and nothing else"
    TO_PACK = "it is packed, because another rank may have accumulated into it since, and stays, as none may have"
    PACKED = "it has been packed in this backward: only what came since is"


class GradientBucket:
    """Parameters whose gradients travel together; the parameters themselves are left where they are.

    Args:
        index: Position in the order of reductions.
        layout: The plan; its slots refer to positions in ``parameters``.
        parameters: All parameters of the plan, at least one of which is in this bucket.
        place: Which shard of the gradient is this process's.
        reduce_dtype: What the gradients travel in; by default their own dtype.
    """

    is_replicated = True
    """Whether every rank steps all of every parameter, so that ``param.grad`` must hold the mean on all of them."""

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        place: ShardPlace,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.layout = layout
        self.place = place
        first = parameters[layout.slots[0].parameter]
        self.dtype = first.dtype
        self.device = first.device
        self.reduce_dtype = reduce_dtype or first.dtype
        self.slots = [ParameterSlot(parameters[place.parameter], self, place) for place in layout.slots]
        self.shard_gradient: Tensor | None = None
        self.unsharded_gradient: Tensor | None = None
        self.is_partial = False
        """Whether ``shard_gradient`` is a sum that more micro-batches of the same window will be added to."""

    @property
    def has_gradients(self) -> bool:
        """Whether any rank had a gradient for any of its parameters; the same on all ranks."""
        return True in [slot.used for slot in self.slots]

    @property
    def shard_dtype(self) -> torch.dtype:
        """What the shard's gradient, and so its optimizer state, is kept in."""
        return self.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """What micro-batches are added up in: many small numbers of 16 bits would be lost in their sum."""
        narrow = self.shard_dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if narrow else self.shard_dtype

    @property
    def has_master_weights(self) -> bool:
        """Whether this rank steps a copy of its shard, not the parameters themselves."""
        return False

    def shard_of(self, unsharded: Tensor) -> Tensor:
        """This rank's part of a buffer of the bucket's length: 1-D, a view."""
        shard = self.place.shard
        return unsharded[self.layout.bounds[shard] : self.layout.bounds[shard + 1]]

    def pack_gradients(self, shown: ShownMean) -> Tensor:
        """Moves the local gradients into a new flat buffer; ``param.grad`` is None afterwards.

        Args:
            shown: What ``param.grad`` may hold of an earlier backward.

        Returns:
            1-D, ``layout.numel`` elements of ``reduce_dtype``; zero where there was no gradient.

        Raises:
            ValueError: A gradient is sparse.
        """
        buffer = torch.empty(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        places, gradients = [], []
        for slot in self.slots:
            earlier, slot.fresh = shown is not ShownMean.ABSENT and not slot.fresh, False
            gradient = None if earlier and shown is ShownMean.PACKED else slot.parameter.grad
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
        """Takes over what users have made of ``param.grad``; here that is where gradients are."""

    def attach_gradients(self) -> None:
        """Hands the reduced gradient to the owners of shards; here there are none."""

    @torch.no_grad()
    def end_partial_sum(self, factor: float) -> None:
        """Multiplies the sum of micro-batches, to which no more are added, and hands it to the owners of shards."""
        if not self.is_partial:
            # It was zeroed.
            return
        self.is_partial = False
        if self.shard_gradient is not None:
            if factor != 1.0:
                self.shard_gradient.mul_(factor)
            self.shard_gradient = self.shard_gradient.to(self.shard_dtype)
        self.attach_gradients()

    def zero_gradients(self, slots: Collection[ParameterSlot], set_to_none: bool = True) -> None:
        """Forgets the reduced gradients of ``slots``, or fills them with zeros."""
        mine = [slot for slot in self.slots if slot in slots]
        if set_to_none and len(mine) == len(self.slots):
            self.shard_gradient = self.unsharded_gradient = None
            self.is_partial = False
        for slot in mine:
            if self.shard_gradient is not None and slot.shard_slice is not None:
                slot.view_into_shard(self.shard_gradient).zero_()
            if set_to_none:
                slot.used = False
                if slot.shard is not None:
                    slot.shard.grad = None
