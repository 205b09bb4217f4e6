"""How large buckets may be, by the size of the model and the number of ranks."""

import math

_SMALLEST_CAP, _SMALLEST_CAP_OF_GPUS, _LARGEST_CAP = 2**23, 2**26, 2**29
"""The bounds of the cap. Smaller buckets save next to nothing at the ends of a step, and each costs the host some dozen
launches. In that time a GPU reads and writes ten times as many bytes as CPUs send. With larger buckets, the forward
waits for too much at its beginning."""

_BYTES_IN_LATENCY = {"cuda": 700 * 2**10, "cpu": 32 * 2**10}
"""Bytes that are sent, for each rank, in the time that a rank adds to the latency of a ring. For GPUs, NCCL's model of
nodes of 8 H100. For CPUs, Gloo's messages of 40 microseconds at some 1 GB/s."""

_RANKS_A_LEVEL = 4
"""An all-reduce between groups uses a tree. Each level of the tree takes as long as so many ranks of a ring."""


def default_bucket_cap(model_bytes: int, ranks: int, device_type: str = "cpu", copies: int = 1) -> int:
    """How large buckets should be.

    A reduce-scatter has a latency alpha and takes beta seconds for a byte. P bytes in buckets of S bytes pay the
    latency P / S times: P / S * alpha. Nothing hides the last bucket of backward, nor the first of forward: S * beta.
    The sum of the two is least at ``sqrt(P * alpha / beta)``. The page on scale has the resulting sizes for up to 1,024
    ranks.

    Args:
        model_bytes: Bytes that a step reduces.
        ranks: The number of ranks that share a copy of the sharded state.
        device_type: The device of the gradients, "cuda" or "cpu".
        copies: The number of groups of so many ranks. The groups sum each shard between them.

    Returns:
        Bytes: the power of two up to that root. The least is 8 MiB, or 64 MiB on GPUs. The most is 512 MiB. Above the
        least, the cap is at most half of the model. So two buckets take no more memory than gradients do under DDP.
    """
    in_latency = _BYTES_IN_LATENCY.get(device_type, _BYTES_IN_LATENCY["cuda"])
    # Between CPUs, each rank sends two messages to every other rank with the same shard.
    between = 2 * (copies - 1) if device_type == "cpu" else _RANKS_A_LEVEL * math.log2(copies)
    best = math.sqrt(model_bytes * in_latency * (ranks + between))
    smallest = _SMALLEST_CAP if device_type == "cpu" else _SMALLEST_CAP_OF_GPUS
    bounded = max(int(min(best, model_bytes / 2, _LARGEST_CAP)), smallest)
    return 1 << (bounded.bit_length() - 1)
