"""What a training will hold and send under each strategy, estimated before it starts.

Activations are not counted: they depend on the batch, and are the same under all strategies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_parstrat.core.full_sharding import FullySharded, ItemSizes
from lightning_parstrat.core.layout import BucketLayout, LayoutPolicy, ParameterSpec, Partition, plan_buckets
from lightning_parstrat.core.memory import BucketMemory, held_between_micro_batches, held_bytes
from lightning_parstrat.core.policy import ShardingPolicy

_BACKWARD = 2 / 3
"""Share of a step's computation that is backward: it computes gradients of inputs and of weights, twice a forward."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a training runs.

    Args:
        nodes: Number of nodes, at least 1.
        devices: Ranks of each node, at least 1.
        bytes_per_second: Of a node's link to the others, in each direction; or of the link within the only node. None
            where it is not known.

    Raises:
        ValueError: A number is out of range.
    """

    nodes: int
    devices: int
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. Must be 1 or more.")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(f"Invalid bytes_per_second: {self.bytes_per_second}. Must be more than 0.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices


class Estimate(NamedTuple):
    """What one rank of a training needs.

    Attributes:
        strategy: Its flag.
        precision: The Trainer's.
        held_bytes: Between two steps: parameters, optimizer state, and gradients that are kept.
        peak_bytes: The maximum within a step, without activations.
        sent_bytes: Handed to collectives per optimizer step.
        wire_seconds: How long a node's link needs for that; None where its bandwidth is not known.
        accumulating_bytes: Held between two micro-batches of a step.
        micro_batches: Of a step.
        reductions: How often a step reduces gradients.
        forwards: How many forwards of a step something is sent behind.
        forward_share: Of what is sent, the part that is sent behind forwards.
    """

    strategy: str
    precision: str
    held_bytes: int
    peak_bytes: int
    sent_bytes: int
    wire_seconds: float | None
    accumulating_bytes: int = 0
    micro_batches: int = 1
    reductions: int = 1
    forwards: int = 1
    forward_share: float = 0.0

    def step_seconds(self, compute_seconds: float) -> float | None:
        """A step's time, if all communication that can hide behind computation does.

        Args:
            compute_seconds: How long a step of one process takes without communication.

        Returns:
            Seconds; None where the bandwidth is not known.
        """
        if self.wire_seconds is None:
            return None
        # Of one micro-batch.
        backward = _BACKWARD * compute_seconds / self.micro_batches
        forward = compute_seconds / self.micro_batches - backward
        # DDP's all-reduce can hide behind the last backward alone. ZeRO-1 sends as much in two halves: the all-gather
        # hides behind the next forward; every reduction behind its own backward. ZeRO-3 gathers in both.
        behind_forward = self.forward_share * self.wire_seconds / self.forwards
        behind_backward = (1 - self.forward_share) * self.wire_seconds / self.reductions
        exposed = self.forwards * max(0.0, behind_forward - forward)
        return compute_seconds + exposed + self.reductions * max(0.0, behind_backward - backward)


def estimate_ddp(
    parameters: Sequence[ParameterSpec],
    state_per_element: float,
    cluster: Cluster,
    precision: str,
    micro_batches: int = 1,
    gradients_in_buckets: bool = True,
) -> Estimate:
    """What a rank needs under ``ddp_tuned``, whose gradients stay in its buckets; or under ``ddp``.

    Args:
        parameters: The trainable ones.
        state_per_element: Bytes of optimizer state for each element of a parameter.
        cluster: Where the training runs.
        precision: The Trainer's; copied to the result.
        micro_batches: Of a step.
        gradients_in_buckets: Whether it is ``ddp_tuned``; Lightning's ``ddp`` copies gradients into buckets.
    """
    parameter_bytes = sum(one.numel * one.itemsize for one in parameters)
    state = round(state_per_element * sum(one.numel for one in parameters))
    ring = 2 * (cluster.world_size - 1) / cluster.world_size * parameter_bytes
    # DDP never frees its buckets; with `gradient_as_bucket_view`, gradients live in them.
    held = (2 if gradients_in_buckets else 3) * parameter_bytes + state
    flag = "ddp_tuned" if gradients_in_buckets else "ddp"
    return Estimate(flag, precision, held, held, round(ring), _seconds(ring, cluster), held, micro_batches)


def estimate_zero1(
    parameters: Sequence[ParameterSpec],
    state_per_element: float,
    cluster: Cluster,
    precision: str,
    *,
    bucket_cap_bytes: int,
    partition: Partition = "element",
    has_master_weights: bool = False,
    shard_ranks: int | None = None,
    micro_batches: int = 1,
    shard_gradients: bool = False,
) -> Estimate:
    """What the rank that needs most needs under ``zero1_custom``, or ``zero2_custom``.

    Args:
        parameters: The trainable ones, in the order of registration.
        state_per_element: Bytes of optimizer state for each element that is stepped.
        cluster: Where the training runs.
        precision: The Trainer's; copied to the result.
        bucket_cap_bytes: The largest bucket.
        partition: How parameters may be cut.
        has_master_weights: Whether fp32 copies are stepped.
        shard_ranks: How many share a copy of the state, consecutive ones; by default all.
        micro_batches: Of a step.
        shard_gradients: Whether it is ``zero2_custom``, which reduces every micro-batch.
    """
    shards = shard_ranks or cluster.world_size
    policy = LayoutPolicy(world_size=shards, bucket_cap_bytes=bucket_cap_bytes, partition=partition)
    # Reversed, as the engine's first plan: gradients become ready from the last layer to the first.
    layouts = plan_buckets(list(reversed(parameters)), policy)
    buckets = [
        BucketMemory(layout, 4 if has_master_weights else layout.itemsize, has_master_weights, state_per_element)
        for layout in layouts
    ]
    ranks = _ranks_to_look_at(shards, partition)
    held = max(held_bytes(buckets, rank).total for rank in ranks)
    between_micro_batches = max(held_between_micro_batches(buckets, rank, shard_gradients).total for rank in ranks)
    reductions = micro_batches if shard_gradients else 1
    total = sum(layout.numel * layout.itemsize for layout in layouts)
    shard_itemsize = buckets[0].shard_itemsize if buckets else 0
    traffic = _zero1_traffic(layouts, shard_itemsize, shards, cluster, reductions)
    # The peak: where the wire is slower than backward, all gradients wait for it at once; of those that do not wait for
    # a last micro-batch, as many buckets as may be in flight.
    bound = ShardingPolicy().bound_in_flight("cuda") or len(layouts)
    most_in_flight = sum(sorted((layout.numel * layout.itemsize for layout in layouts), reverse=True)[:bound])
    return Estimate(
        "zero2_custom" if shard_gradients else "zero1_custom",
        precision,
        held,
        between_micro_batches + most_in_flight if shard_gradients else held + total,
        round(traffic.sent),
        _seconds(traffic.between, cluster),
        between_micro_batches,
        micro_batches,
        reductions,
        forward_share=1 / (reductions + 1),
    )


def estimate_zero3(
    sharded: FullySharded,
    state_per_element: float,
    cluster: Cluster,
    precision: str,
    *,
    gathered_itemsize: int = 4,
    micro_batches: int = 1,
) -> Estimate:
    """What the rank that needs most needs under ``zero3_custom``, which steps in fp32.

    Args:
        sharded: The module's parameters, by unit, over all ranks.
        state_per_element: Bytes of optimizer state for each element that is stepped.
        cluster: Where the training runs.
        precision: The Trainer's; copied to the result.
        gathered_itemsize: Bytes of an element of what is gathered: 2 with ``gather_dtype="bf16"``.
        micro_batches: Of a step, each of which gathers and reduces.
    """
    sizes = ItemSizes(gathered=gathered_itemsize)
    # It has whole rows; of the others, the last ones may have fewer.
    held = sharded.held_bytes(0, sizes.sharded, state_per_element)
    peak = sharded.peak_bytes(held, sizes, accumulates=micro_batches > 1)
    per_micro_batch = sharded.sent_bytes(sizes)
    # Around a ring of all ranks, as NCCL's: as much leaves a node as a rank.
    sent = micro_batches * sum(per_micro_batch)
    return Estimate(
        "zero3_custom",
        precision,
        held.total,
        peak,
        round(sent),
        _seconds(sent, cluster),
        held.total,
        micro_batches,
        reductions=micro_batches,
        forwards=micro_batches,
        forward_share=per_micro_batch.forward / max(1.0, sum(per_micro_batch)),
    )


class _Traffic(NamedTuple):
    """What a step sends, in bytes: each process, and over the wire that the cluster's bandwidth is of."""

    sent: float
    between: float


def _zero1_traffic(
    layouts: Sequence[BucketLayout], shard_itemsize: int, shards: int, cluster: Cluster, reductions: int
) -> _Traffic:
    """Of a step that reduces its gradients ``reductions`` times, each into ``shards`` shards."""
    total = sum(layout.numel * layout.itemsize for layout in layouts)
    # As often as gradients are reduced, and once for the parameters.
    phases = reductions + 1
    sent = phases * (shards - 1) / shards * total
    # In two levels, K nodes send (K - 1) / K of a bucket per phase, however many ranks each node has.
    nodes = max(1, shards // cluster.devices)
    between = phases * (nodes - 1) / nodes * total if cluster.nodes > 1 else sent
    copies = cluster.world_size // shards
    if copies > 1:
        # An all-reduce of each rank's shard, which all ranks of a node make at once.
        summed = sum(layout.numel for layout in layouts) * shard_itemsize / shards * reductions
        sent += 2 * (copies - 1) / copies * summed
        between += 2 * (copies - 1) / copies * summed * (cluster.devices if cluster.nodes > 1 else 1)
    return _Traffic(sent, between)


def _ranks_to_look_at(world_size: int, partition: Partition) -> Sequence[int]:
    """Shards that may be cut anywhere are equal except for padding, which the last rank has: the first needs most."""
    return (0,) if partition == "element" else range(world_size)


def _seconds(nbytes: float, cluster: Cluster) -> float | None:
    if cluster.world_size == 1:
        return 0.0
    return None if cluster.bytes_per_second is None else nbytes / cluster.bytes_per_second
