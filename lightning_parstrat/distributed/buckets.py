"""Flat storage of parameters, and the life of their gradients.

A bucket's parameters live in one flat buffer, each as a view that keeps its strides, so that its shards can be
gathered in place. A gradient buffer is allocated when a bucket's gradients are packed and freed with its
reduce-scatter; what remains is the shard.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_parstrat.core.layout import BucketLayout, ShardSlice, Slot


class ParameterSlot:
    """One parameter's place in its bucket, and what is known of its gradient.

    Attributes:
        parameter: The user's parameter, whose data is a view into the bucket.
        bucket: The bucket it lies in.
        place: Where it lies.
        strides: The strides it has there: its own where it is dense (channels_last is kept), else row-major.
        piece: Which part of it this rank owns, or None.
        shard: That part as a parameter for the optimizer, or None.
        expected: Whether the next bucket launch waits for its gradient.
        fresh: Whether autograd has accumulated into ``param.grad`` since it was last packed.
        arrived: Whether this rank had a gradient for it in the current backward.
        reduced: Whether any rank had a gradient for it in the last backward that was reduced.
        used: Whether any rank has had a gradient for it since gradients were zeroed.
        idle_backwards: In how many backwards in a row no rank had a gradient for it though it was trainable.
    """

    __slots__ = (
        "arrived",
        "bucket",
        "expected",
        "fresh",
        "idle_backwards",
        "parameter",
        "piece",
        "place",
        "reduced",
        "shard",
        "strides",
        "used",
    )

    def __init__(self, parameter: nn.Parameter, bucket: "ParameterBucket", place: Slot) -> None:
        self.parameter = parameter
        self.bucket = bucket
        self.place = place
        self.strides = torch.empty_like(parameter, device="meta").stride()
        self.piece = bucket.layout.slice_of(place, bucket.rank)
        self.shard: nn.Parameter | None = None
        self.expected = False
        self.fresh = False
        self.arrived = False
        self.reduced = False
        self.used = False
        self.idle_backwards = 0

    def view_into(self, flat: Tensor) -> Tensor:
        """This parameter's place in a buffer of the bucket's length, in the parameter's shape and strides."""
        return flat.as_strided(self.parameter.shape, self.strides, flat.storage_offset() + self.place.offset)

    def view_into_shard(self, flat_shard: Tensor) -> Tensor:
        """The part this rank owns, in a buffer of the shard's length: 1-D, or all of the parameter in its shape."""
        if self.piece is None:
            raise AssertionError("a view of a shard was asked for on a rank that owns nothing of it")
        start = flat_shard.storage_offset() + self.piece.shard_start
        if self.piece.numel == self.place.numel:
            # An optimizer that looks at shapes (Muon, Adafactor) must see the parameter's own.
            return flat_shard.as_strided(self.parameter.shape, self.strides, start)
        return flat_shard.as_strided((self.piece.numel,), (1,), start)

    def storage_order(self, whole: Tensor) -> Tensor:
        """A tensor of the parameter's shape as 1-D, its elements in the order in which they lie in the bucket."""
        if whole.stride() != self.strides:
            whole = torch.empty_strided(whole.shape, self.strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((whole.numel(),), (1,))

    def part_of(self, whole: Tensor) -> Tensor:
        """The part this rank owns of a tensor of the parameter's shape: a view where its strides are the bucket's."""
        if self.piece is None or self.shard is None:
            raise AssertionError("a part of a parameter was asked for on a rank that owns nothing of it")
        start = self.piece.parameter_start
        part = self.storage_order(whole)[start : start + self.piece.numel]
        return part.as_strided(self.shard.shape, self.strides) if self.piece.numel == self.place.numel else part

    def owned_by(self, rank: int) -> ShardSlice:
        """Which part of it ``rank`` owns.

        Raises:
            AssertionError: ``rank`` owns nothing of it.
        """
        piece = self.bucket.layout.slice_of(self.place, rank)
        if piece is None:
            raise AssertionError(f"rank {rank} owns nothing of a parameter it has state for")
        return piece


class ParameterBucket:
    """Parameters that travel together.

    Creating it moves the parameters' storage into one flat buffer: while it runs, the bucket's parameters exist twice,
    so that setting up many buckets one after the other peaks at one bucket. Not collective.

    Args:
        index: Position in the order of reductions.
        layout: The plan; its slots refer to positions in ``parameters``.
        parameters: The parameters of the whole plan.
        rank: Whose shard is this process's.
    """

    def __init__(self, index: int, layout: BucketLayout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.index = index
        self.layout = layout
        self.rank = rank
        first = parameters[layout.slots[0].parameter]
        self.flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self.slots = [ParameterSlot(parameters[place.parameter], self, place) for place in layout.slots]
        self.shard_gradient: Tensor | None = None
        self.whole_gradient: Tensor | None = None
        self.move_in()
        for slot in self.slots:
            if slot.piece is not None:
                slot.shard = nn.Parameter(slot.view_into_shard(self.shard))

    @property
    def has_gradients(self) -> bool:
        """Whether any rank had a gradient for any of its parameters; the same on all ranks."""
        return any(slot.used for slot in self.slots)

    @property
    def shard(self) -> Tensor:
        """This rank's part of the flat buffer: 1-D, ``layout.shard_numel`` elements, a view."""
        return self.shard_of(self.flat)

    def shard_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a buffer of the bucket's length: 1-D, ``layout.shard_numel`` elements, a view."""
        return whole.view(self.layout.world_size, -1)[self.rank]

    @torch.no_grad()
    def move_in(self) -> None:
        """Brings every parameter whose data is not its place in the buffer (at first all, later those swapped) there.

        Raises:
            ValueError: A parameter has changed its shape, dtype or device since the plan was made.
        """
        for slot in self.slots:
            if slot.place.numel == 0:
                continue
            data = slot.parameter.data
            home = self.flat.data_ptr() + slot.place.offset * self.flat.element_size()
            if data.data_ptr() == home and data.stride() == slot.strides:
                continue
            if data.numel() != slot.place.numel or data.dtype != self.flat.dtype or data.device != self.flat.device:
                raise ValueError(
                    f"A parameter had {slot.place.numel} elements of {self.flat.dtype} on {self.flat.device} when"
                    f" training began and has {data.numel()} of {data.dtype} on {data.device} now. Convert the module"
                    " before `fit`, not during it."
                )
            view = slot.view_into(self.flat)
            view.copy_(data)
            slot.parameter.data = view

    @torch.no_grad()
    def move_out(self) -> None:
        """Gives every parameter storage of its own again and frees the bucket's; shards keep only their shapes."""
        for slot in self.slots:
            slot.parameter.data = slot.parameter.data.clone()
            if slot.shard is not None:
                slot.shard.grad = None
                slot.shard.data = self.flat.new_zeros(()).expand(slot.shard.shape)
        self.shard_gradient = self.whole_gradient = None
        self.flat = self.flat.new_empty(0)

    def pack_gradients(self) -> Tensor:
        """Moves the local gradients into a new flat buffer; ``param.grad`` is None afterwards.

        Returns:
            1-D, ``layout.numel`` elements of the parameters' dtype; zero where there was no gradient.

        Raises:
            ValueError: A gradient is sparse.
        """
        buffer = torch.empty_like(self.flat)
        places, gradients = [], []
        for slot in self.slots:
            slot.fresh = False
            gradient = slot.parameter.grad
            place = slot.view_into(buffer)
            if gradient is None:
                place.zero_()
                continue
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"A parameter of shape {tuple(slot.parameter.shape)} got a sparse gradient ({gradient.layout});"
                    " only dense gradients can be sharded. Use `sparse=False` in its nn.Embedding or nn.EmbeddingBag."
                )
            slot.arrived = True
            slot.parameter.grad = None
            places.append(place)
            gradients.append(gradient.detach())
        if places:
            torch._foreach_copy_(places, gradients)
        return buffer

    def attach_exposed_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` its part of ``param.grad``, as its user has left it."""
        for slot in self.slots:
            if slot.shard is not None:
                gradient = slot.parameter.grad
                slot.shard.grad = None if gradient is None else slot.part_of(gradient)

    def attach_gradients(self) -> None:
        """Makes each owned shard's ``.grad`` a view of the reduced gradient, or None where no rank had one."""
        for slot in self.slots:
            if slot.shard is None:
                continue
            if self.shard_gradient is None or not slot.used:
                slot.shard.grad = None
            else:
                slot.shard.grad = slot.view_into_shard(self.shard_gradient)

    def zero_gradients(self, set_to_none: bool = True) -> None:
        """Forgets the reduced gradient, or fills it with zeros."""
        if not set_to_none:
            if self.shard_gradient is not None:
                self.shard_gradient.zero_()
            return
        self.shard_gradient = self.whole_gradient = None
        for slot in self.slots:
            slot.used = False
            if slot.shard is not None:
                slot.shard.grad = None
