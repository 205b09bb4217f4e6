"""What a training will hold and send under each strategy, estimated before it starts.

Activations are not counted: they depend on the batch, and are the same under both strategies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, Partition, plan_buckets
from lightning_parstrat.core.memory import BucketMemory, held_bytes

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
        peak_bytes: The maximum while backward runs, without activations.
        sent_bytes: Handed to collectives per optimizer step.
        wire_seconds: How long a node's link needs for that; None where its bandwidth is not known.
    """

    strategy: str
    precision: str
    held_bytes: int
    peak_bytes: int
    sent_bytes: int
    wire_seconds: float | None

    def step_seconds(self, compute_seconds: float) -> float | None:
        """A step's time, if all communication that can hide behind computation does.

        Args:
            compute_seconds: How long a step of one process takes without communication.

        Returns:
            Seconds; None where the bandwidth is not known.
        """
        if self.wire_seconds is None:
            return None
        backward, forward = _BACKWARD * compute_seconds, (1 - _BACKWARD) * compute_seconds
        # DDP's all-reduce can hide behind backward alone. ZeRO-1 sends as much in two halves: the all-gather hides
        # behind the next forward.
        if self.strategy.startswith("ddp"):
            return compute_seconds + max(0.0, self.wire_seconds - backward)
        phase = self.wire_seconds / 2
        return compute_seconds + max(0.0, phase - backward) + max(0.0, phase - forward)


def estimate_ddp(
    parameters: Sequence[ParameterSpec], state_per_element: float, cluster: Cluster, precision: str
) -> Estimate:
    """What a rank needs under ``ddp_tuned``, whose gradients stay in its buckets.

    Args:
        parameters: The trainable ones.
        state_per_element: Bytes of optimizer state for each element of a parameter.
        cluster: Where the training runs.
        precision: The Trainer's; copied to the result.
    """
    parameter_bytes = sum(one.numel * one.itemsize for one in parameters)
    state = round(state_per_element * sum(one.numel for one in parameters))
    ring = 2 * (cluster.world_size - 1) / cluster.world_size * parameter_bytes
    # Twice: with `gradient_as_bucket_view`, gradients live in the buckets, which DDP never frees.
    held = 2 * parameter_bytes + state
    return Estimate("ddp_tuned", precision, held, held, round(ring), _seconds(ring, cluster))


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
) -> Estimate:
    """What the rank that needs most needs under ``zero1_custom``.

    Args:
        parameters: The trainable ones, in the order of registration.
        state_per_element: Bytes of optimizer state for each element that is stepped.
        cluster: Where the training runs.
        precision: The Trainer's; copied to the result.
        bucket_cap_bytes: The largest bucket.
        partition: How parameters may be cut.
        has_master_weights: Whether fp32 copies are stepped.
        shard_ranks: How many share a copy of the state, consecutive ones; by default all.
    """
    shards = shard_ranks or cluster.world_size
    policy = LayoutPolicy(world_size=shards, bucket_cap_bytes=bucket_cap_bytes, partition=partition)
    # Reversed, as the engine's first plan: gradients become ready from the last layer to the first.
    layouts = plan_buckets(list(reversed(parameters)), policy)
    buckets = [
        BucketMemory(layout, 4 if has_master_weights else layout.itemsize, has_master_weights, state_per_element)
        for layout in layouts
    ]
    held = max(held_bytes(buckets, rank).total for rank in _ranks_to_look_at(shards, partition))
    total = sum(layout.numel * layout.itemsize for layout in layouts)
    # In two levels, K nodes send (K - 1) / K of a bucket per phase, however many ranks each node has.
    nodes = max(1, shards // cluster.devices)
    sent = 2 * (shards - 1) / shards * total
    between = 2 * (nodes - 1) / nodes * total if cluster.nodes > 1 else sent
    copies = cluster.world_size // shards
    if copies > 1:
        # An all-reduce of each rank's shard, which all ranks of a node make at once.
        summed = sum(layout.numel for layout in layouts) * buckets[0].shard_itemsize / shards if buckets else 0.0
        sent += 2 * (copies - 1) / copies * summed
        between += 2 * (copies - 1) / copies * summed * (cluster.devices if cluster.nodes > 1 else 1)
    # The peak: where the wire is slower than backward, all gradients wait for it at once.
    return Estimate("zero1_custom", precision, held, held + total, round(sent), _seconds(between, cluster))


def _ranks_to_look_at(world_size: int, partition: Partition) -> Sequence[int]:
    """Shards that may be cut anywhere are equal except for padding, which the last rank has: the first needs most."""
    return (0,) if partition == "element" else range(world_size)


def _seconds(nbytes: float, cluster: Cluster) -> float | None:
    if cluster.world_size == 1:
        return 0.0
    return None if cluster.bytes_per_second is None else nbytes / cluster.bytes_per_second
