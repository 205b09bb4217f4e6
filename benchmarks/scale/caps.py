"""How large buckets should be, by how many ranks there are and what the wire takes.

A ring's latency grows with the ranks, so that small buckets pay for it again and again; large ones leave more for the
end of backward and the beginning of forward, which nothing hides. The rule:

    cap = the first power of two from alpha / beta on, from 32 MiB to 512 MiB,

with alpha and beta of the straight line through what large reduce-scatters take. A bucket of alpha / beta bytes travels
for as long as it has latency: it gets half of the wire's bandwidth, and no bucket of twice the size is twice as fast.
On nodes of 8 H100 that is 0.7 MiB a rank, so as many MiB as there are ranks, where those are a power of two.
"""

import math

from benchmarks.scale.networks import Network
from lightning_parstrat.core.cost_model import AlphaBeta, fit_alpha_beta

MIB = 2**20
SMALLEST = 32 * MIB
LARGEST = 512 * MIB
_SIZES = tuple(2**power for power in range(25, 30))
"""32 to 512 MiB, as large as caps are. Small ones travel by another protocol, LL, whose latency is half of LL128's and
whose bandwidth a tenth: a line through them says nothing of buckets."""


def wire_of(network: Network) -> AlphaBeta:
    """The line through the times of large reduce-scatters, as a calibration would fit it."""
    return fit_alpha_beta([(size, network.cost("reduce_scatter", size).seconds) for size in _SIZES]).model


def recommended_cap(
    cost: AlphaBeta, *, smallest: int = SMALLEST, largest: int = LARGEST, memory_bound: int | None = None
) -> int:
    """The default cap of zero1_custom's buckets, in bytes.

    Args:
        cost: What large reduce-scatters take over these ranks.
        smallest: Where latency is low, larger buckets cost nothing that smaller ones would save.
        largest: Where latency is high, the beginning of forward waits for a whole bucket.
        memory_bound: The most that the memory for a bucket in flight allows; it counts before the others.

    Returns:
        A power of two, unless bounded by another: measured again, a slightly different line gives the same plan.
    """
    wanted = cost.latency_seconds / cost.seconds_per_byte if cost.seconds_per_byte else largest
    power = 1 << (max(1, math.ceil(wanted)) - 1).bit_length()
    cap = min(max(power, smallest), largest)
    return cap if memory_bound is None else min(cap, memory_bound)
