"""How large buckets may be, by the size of the model and the number of ranks."""

import math

_SMALLEST_CAP, _SMALLEST_CAP_OF_GPUS, _LARGEST_CAP = 2**23, 2**26, 2**29
"""Smaller buckets save next to nothing at the ends of a step, and each costs the host time: some dozen launches, in
which a GPU reads and writes ten times as many bytes as CPUs send. What is larger has the forward wait for too much at
its beginning."""

_BYTES_IN_LATENCY = {"cuda": 700 * 2**10, "cpu": 32 * 2**10}
"""What travels, for each rank, in the time that it adds to the latency of a ring: NCCL's model of nodes of 8 H100, and
Gloo's messages of 40 microseconds at some 1 GB/s."""

_RANKS_A_LEVEL = 4
"""An all-reduce between groups goes up and down a tree: each of its levels takes as long as so many ranks of a ring."""


def default_bucket_cap(model_bytes: int, ranks: int, device_type: str = "cpu", copies: int = 1) -> int:
    """How large buckets should be.

    A reduce-scatter has a latency alpha and takes beta seconds for a byte. Buckets of S bytes, of P in all, each pay
    the latency: P / S * alpha. Nothing hides the last of backward, nor the first of forward: S * beta. The sum of the
    two is least at ``sqrt(P * alpha / beta)``. The page on scale has what that comes to on up to 1,024 ranks.

    Args:
        model_bytes: What is reduced in a step.
        ranks: Those that share a copy of what is sharded.
        device_type: Of the gradients: "cuda" or "cpu".
        copies: Groups of so many ranks, which sum each shard between them.

    Returns:
        Bytes: the power of two up to that root, from 8 MiB, on GPUs 64, to 512 MiB. Above the smallest it is no more
        than half of the model, so that two buckets take no more memory than gradients do under DDP.
    """
    best = math.sqrt(model_bytes * bytes_in_latency(ranks, device_type, copies))
    smallest = _SMALLEST_CAP if device_type == "cpu" else _SMALLEST_CAP_OF_GPUS
    bounded = max(int(min(best, model_bytes / 2, _LARGEST_CAP)), smallest)
    return 1 << (bounded.bit_length() - 1)


def bytes_in_latency(ranks: int, device_type: str, copies: int = 1) -> float:
    """What travels in the time of a reduce-scatter's latency: alpha / beta of the network that is assumed.

    Args:
        ranks: See :func:`default_bucket_cap`, as for the others.
        device_type: Of the gradients.
        copies: Groups of so many ranks.
    """
    in_latency = _BYTES_IN_LATENCY.get(device_type, _BYTES_IN_LATENCY["cuda"])
    # Between CPUs each rank sends all others of the same shard two messages.
    between = 2 * (copies - 1) if device_type == "cpu" else _RANKS_A_LEVEL * math.log2(copies)
    return in_latency * (ranks + between)
