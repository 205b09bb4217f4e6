"""One parameter's place in a bucket, and what is known of its gradient."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_parstrat.core.layout import ShardSlice, Slot

if TYPE_CHECKING:
    from lightning_parstrat.distributed.buckets import GradientBucket


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
        is_stranger: Whether its user has given it other data, of which the bucket holds a copy.
        trainable: Whether it required a gradient when the last backward began.
        idle_backwards: In how many backwards in a row no rank had a gradient for it though it was trainable.
    """

    __slots__ = (
        "arrived",
        "bucket",
        "expected",
        "fresh",
        "idle_backwards",
        "is_stranger",
        "parameter",
        "piece",
        "place",
        "reduced",
        "shard",
        "strides",
        "trainable",
        "used",
    )

    def __init__(self, parameter: Tensor, bucket: "GradientBucket", place: Slot) -> None:
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
        self.is_stranger = False
        self.trainable = False
        self.idle_backwards = 0

    @property
    def has_master_weights(self) -> bool:
        """Whether what this rank steps for it is a copy that is kept in fp32."""
        return self.shard is not None and self.bucket.has_master_weights

    def take_over(self, earlier: "ParameterSlot") -> None:
        """What is known of the gradient stays known in another bucket."""
        for name in ("arrived", "fresh", "idle_backwards", "reduced", "trainable", "used"):
            setattr(self, name, getattr(earlier, name))

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
