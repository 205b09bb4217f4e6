"""The user's choices about sharding, gradients and checkpoints, validated on construction."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_parstrat.core.accumulation import PartialWindow
from lightning_parstrat.core.bucket_cap import default_bucket_cap
from lightning_parstrat.core.checks import check, check_choices, check_flags, is_number, is_whole
from lightning_parstrat.core.shard_groups import ShardGroupChoice

BucketCap = float | Literal["auto"]
PartitionChoice = Literal["auto", "element", "parameter"]
ExposeGradients = Literal["auto"] | bool
MasterWeights = Literal["auto"] | bool
CommDtype = Literal["bf16"] | torch.dtype | None
BoundInFlight = int | Literal["auto"] | None
ClipScope = Literal["optimizer", "global"]
NonfiniteGradients = Literal["propagate", "skip", "raise"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]
StageSharding = Literal["state", "parameters"]
WrapPolicy = Sequence[str | type[nn.Module]] | set[type[nn.Module]] | None
CheckpointFormat = Literal["full", "sharded"]
RankShares = Literal["equal", "auto"] | Sequence[float]
OuterDtype = Literal["bf16", "int8"] | None


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """How parameters are bucketed and owned. The strategy ``ZeRO1Strategy`` documents these arguments, which it takes.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    bucket_cap_mb: BucketCap = "auto"
    partition: PartitionChoice = "auto"
    expose_gradients: ExposeGradients = "auto"
    master_weights: MasterWeights = "auto"
    overlap_param_gather: bool = True
    max_inflight_buckets: BoundInFlight = "auto"
    shard_group: ShardGroupChoice = "all"
    shard_gradients: bool = False
    comm_dtype: CommDtype = None
    gather_dtype: CommDtype = None
    activation_checkpointing_policy: WrapPolicy = None

    def __post_init__(self) -> None:
        cap, bound = self.bucket_cap_mb, self.max_inflight_buckets
        number = is_number(cap) and float(cap) > 0
        check(self, "bucket_cap_mb", number or cap == "auto", "a positive number of MiB, such as 8, or 'auto'")
        check_choices(self, partition=PartitionChoice)
        for name in ("expose_gradients", "master_weights"):
            value = getattr(self, name)
            check(self, name, value == "auto" or isinstance(value, bool), "'auto', True or False")
        check_flags(self, "overlap_param_gather", "shard_gradients")
        allowed = is_whole(bound, 1) or bound in ("auto", None)
        check(self, "max_inflight_buckets", allowed, "a whole number >= 1, 'auto' or None")
        _check_shard_group(self)
        _check_classes(self, "activation_checkpointing_policy")
        _name_dtypes(self, "comm_dtype", "gather_dtype")
        for name in ("comm_dtype", "gather_dtype"):
            allowed = getattr(self, name) in ("bf16", None)
            check(self, name, allowed, "'bf16', torch.bfloat16, or None for the parameters' own dtype")
        if self.gather_dtype is not None and self.master_weights is False:
            raise ValueError(
                f"gather_dtype={self.gather_dtype!r} rounds parameters in every step, so it needs the fp32 shards that"
                " master_weights=False forgoes. Leave master_weights='auto', or gather_dtype=None."
            )

    def bucket_cap_bytes(self, model_bytes: int, ranks: int, device_type: str, copies: int) -> int:
        """The cap in bytes, at least one.

        Args:
            model_bytes: Bytes that a step reduces.
            ranks: The number of ranks that share a copy of the sharded state.
            device_type: The device of the gradients.
            copies: The number of groups of so many ranks.
        """
        if self.bucket_cap_mb == "auto":
            return default_bucket_cap(model_bytes, ranks, device_type, copies)
        return max(1, int(self.bucket_cap_mb * 2**20))

    def bound_in_flight(self, device_type: str) -> int | None:
        """How many buckets of gradients may be in flight. If ranks send only what any of them has, None.

        On a GPU there always is a bound, though it may never be reached. With a bound, ranks send all that is expected
        before they agree on what came. Without a bound, two waits could block each other. One rank's host waits for the
        flags of the others. The others, within their backwards, wait for their device (an allocation may). So they wait
        for the bucket that the first rank has not sent.

        Args:
            device_type: The device of the gradients.
        """
        if device_type == "cpu":
            return None if self.max_inflight_buckets == "auto" else self.max_inflight_buckets
        if self.max_inflight_buckets == "auto":
            return _IN_FLIGHT_ON_GPU
        return sys.maxsize if self.max_inflight_buckets is None else self.max_inflight_buckets

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which a copy of shards of ``dtype`` is kept and stepped. If no copy is needed, None."""
        narrow = dtype in (torch.float16, torch.bfloat16)
        # Parameters that are rounded for the all-gather need a copy, too. Without a copy, updates smaller than a bf16
        # step would be lost.
        rounded = self.gathered_in(dtype) != dtype
        return torch.float32 if (narrow and self.master_weights is not False) or rounded else None

    def reduced_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` are sent."""
        return _narrowed(dtype, self.comm_dtype)

    def gathered_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters of ``dtype`` are sent."""
        return _narrowed(dtype, self.gather_dtype)


@dataclass(frozen=True, kw_only=True)
class OuterPolicy:
    """How groups that train alone meet. The strategy ``ZeRO1Strategy`` documents these arguments, which it takes.

    Raises:
        ValueError: A value is not allowed, or has no effect. The message contains what to set.
    """

    outer_every: int | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_dtype: OuterDtype = None
    shard_group: ShardGroupChoice = "all"

    def __post_init__(self) -> None:
        every, lr, momentum = self.outer_every, self.outer_lr, self.outer_momentum
        check(self, "outer_every", every is None or is_whole(every, 1), "a whole number of steps >= 1, or None")
        check(self, "outer_lr", is_number(lr) and lr > 0, "a positive number, such as 1.0")
        check(self, "outer_momentum", is_number(momentum) and 0 <= momentum < 1, "a number in [0, 1), such as 0.9")
        check_choices(self, outer_dtype=Literal["bf16", "int8", None])
        if every is not None and self.shard_group == "all":
            raise ValueError(
                f"outer_every={every} needs groups that train alone, and shard_group='all' is one group. Set"
                " shard_group='node', or a number of ranks."
            )
        if every is None and (lr, momentum, self.outer_dtype) != (1.0, 0.0, None):
            raise ValueError(
                "outer_lr, outer_momentum and outer_dtype have no effect without outer_every. Set it, such as"
                " outer_every=50."
            )

    def due(self, step: int, buckets: int) -> list[int]:
        """The buckets that groups average after a step. They take turns, so that no step sends the whole model.

        Args:
            step: The number of steps so far.
            buckets: The number of buckets.
        """
        every = self.outer_every or 1
        return [one for one in range(buckets) if (step + one * every // buckets) % every == 0]


@dataclass(frozen=True, kw_only=True)
class PipelinePolicy:
    """How a module is cut into stages. The strategy ``PipelineStrategy`` documents these arguments, which it takes.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    stages: Literal["auto"] | list[int] = "auto"
    microbatches: int = 4
    schedule: PipelineSchedule = "1f1b"
    auto_wrap_policy: WrapPolicy = None
    data_parallel_size: Literal["auto"] | int = "auto"
    tensor_parallel_size: int = 1
    shard: StageSharding = "state"

    def __post_init__(self) -> None:
        check(self, "tensor_parallel_size", is_whole(self.tensor_parallel_size, 1), "a whole number of ranks >= 1")
        check_choices(self, shard=StageSharding)
        divides = self.tensor_parallel_size > 1 or self.shard == "parameters"
        if divides and self.schedule in ("zero_bubble", "zbv", "dualpipev"):
            raise ValueError(
                f"schedule={self.schedule!r} splits backwards, and FSDP2 and tensor-parallel layers do not take such"
                " backwards. Set schedule='1f1b', 'gpipe' or 'interleaved'."
            )
        _check_classes(self, "auto_wrap_policy")
        size = self.data_parallel_size
        check(self, "data_parallel_size", size == "auto" or is_whole(size, 1), "'auto', or a whole number >= 1")
        check(self, "microbatches", is_whole(self.microbatches, 1), "a whole number >= 1")
        check_choices(self, schedule=PipelineSchedule)
        is_list = isinstance(self.stages, (list, tuple)) and all(is_whole(size, 1) for size in self.stages)
        allowed = self.stages == "auto" or (is_list and len(self.stages) > 0)
        check(self, "stages", allowed, "'auto', or the number of blocks of each stage, such as [5, 3]")


@dataclass(frozen=True, kw_only=True)
class FullShardingPolicy:
    """How FSDP2 shards, gathers and reduces. The strategy ``ZeRO3Strategy`` documents these arguments, which it takes.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    auto_wrap_policy: WrapPolicy = None
    min_num_params: int = 0
    reshard_after_forward: bool = True
    shard_gradients: bool = True
    shard_group: ShardGroupChoice = "all"
    tensor_parallel_size: int = 1
    comm_dtype: Literal["bf16", "fp32"] | torch.dtype | None = None
    param_dtype: Literal["auto", "bf16"] | torch.dtype | None = "auto"
    activation_checkpointing_policy: WrapPolicy = None

    def __post_init__(self) -> None:
        _check_classes(self, "auto_wrap_policy")
        _check_classes(self, "activation_checkpointing_policy")
        check(self, "min_num_params", is_whole(self.min_num_params, 0), "a whole number >= 0")
        check_flags(self, "reshard_after_forward", "shard_gradients")
        _check_shard_group(self)
        check(self, "tensor_parallel_size", is_whole(self.tensor_parallel_size, 1), "a whole number of ranks >= 1")
        _name_dtypes(self, "comm_dtype", "param_dtype")
        allowed = self.comm_dtype in ("bf16", "fp32", None)
        check(self, "comm_dtype", allowed, "'bf16', 'fp32', or None for the gradients' own dtype")
        allowed = self.param_dtype in ("auto", "bf16", None)
        check(self, "param_dtype", allowed, "'auto', 'bf16', or None for the parameters' own dtype")


@dataclass(frozen=True, kw_only=True)
class DivisionPolicy:
    """How the samples of a step are divided among ranks. The base class ``ComposedStrategy`` documents the arguments.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    rank_shares: RankShares = "equal"
    max_share: float = 2.0
    keep_global_batch: bool = False

    def __post_init__(self) -> None:
        shares, bound = self.rank_shares, self.max_share
        numbers = list(shares) if isinstance(shares, (list, tuple)) else []
        allowed = shares in ("equal", "auto") or all(is_number(one) and one > 0 for one in numbers or [0])
        must_be = "'equal', 'auto', or a list with a positive number for each rank, such as [3, 1]"
        check(self, "rank_shares", allowed, must_be)
        check(self, "max_share", is_number(bound) and bound >= 1, "a number >= 1, such as 2.0")
        check_flags(self, "keep_global_batch")
        largest = max(numbers) * len(numbers) / sum(numbers) if numbers else 1.0
        if largest > bound:
            raise ValueError(
                f"rank_shares={numbers!r} gives a rank {largest:.3g} times an equal share, and max_share={bound!r}"
                " bounds the memory of a micro-batch. If it fits, set a larger max_share."
            )


_IN_FLIGHT_ON_GPU = 4
"""Enough to keep the network busy: one bucket is sent, one waits for it, and two are being filled."""


def _check_classes(policy: object, name: str) -> None:
    classes = getattr(policy, name)
    allowed = classes is None or isinstance(classes, (list, tuple, set, frozenset))
    allowed = allowed and all(isinstance(one, (str, type)) for one in classes or ())
    check(policy, name, allowed, "a list or set of classes or their names, or None")


def _check_shard_group(policy: ShardingPolicy | FullShardingPolicy) -> None:
    allowed = is_whole(policy.shard_group, 1) or policy.shard_group in ("all", "node")
    check(policy, "shard_group", allowed, "'all', 'node', or a whole number of ranks >= 1, such as 8")


_DTYPE_NAMES: dict[object, str] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _name_dtypes(policy: object, *names: str) -> None:
    """Replaces dtypes of torch by their names, if they have one here."""
    for name in names:
        value = getattr(policy, name)
        if isinstance(value, torch.dtype):
            object.__setattr__(policy, name, _DTYPE_NAMES.get(value, value))


def _narrowed(dtype: torch.dtype, choice: CommDtype) -> torch.dtype:
    # Only fp32 is narrowed. 16-bit types would gain nothing, and a training in fp64 needs its digits.
    return torch.bfloat16 if choice == "bf16" and dtype == torch.float32 else dtype


@dataclass(frozen=True, kw_only=True)
class CommonPolicy:
    """The arguments of all strategies. Their base class ``ComposedStrategy`` documents these arguments.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    state_dict_type: CheckpointFormat = "full"
    async_save: bool = False
    exact_evaluation: bool = False
    partial_window: PartialWindow = "exact"
    clip_scope: ClipScope = "optimizer"
    norm_type: float | Literal["inf"] = 2.0
    nonfinite_grads: NonfiniteGradients = "propagate"
    stall_warning_seconds: float | None = 15.0

    def __post_init__(self) -> None:
        check_choices(self, state_dict_type=CheckpointFormat, partial_window=PartialWindow, clip_scope=ClipScope)
        check_choices(self, nonfinite_grads=NonfiniteGradients)
        check_flags(self, "async_save", "exact_evaluation")
        p, after = self.norm_type, self.stall_warning_seconds
        number = p in ("inf", math.inf) or (is_number(p) and float(p) > 0)
        check(self, "norm_type", number, "a positive number, such as 2.0, or inf")
        allowed = after is None or (is_number(after) and after > 0)
        must_be = "a positive number of seconds, such as 15, or None for no warning"
        check(self, "stall_warning_seconds", allowed, must_be)
        if self.async_save and self.state_dict_type != "sharded":
            raise ValueError(
                "async_save=True needs state_dict_type='sharded': a full checkpoint is gathered on one rank, for"
                " which all have to wait. Set that, too."
            )

    @property
    def p(self) -> float:
        """The norm's type as a number."""
        return float(self.norm_type)
