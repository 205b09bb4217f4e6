"""How large buckets should be, by the model, the ranks and what the wire takes.

Buckets of S bytes, of P in all, each pay a ring's latency alpha, which grows with the ranks: P / S * alpha. Nothing
hides the last of backward, or the first of forward: S * beta. The sum of the two is least at

    S = sqrt(P * alpha / beta),

with alpha and beta of the straight line through what large reduce-scatters take. Where everything is hidden but those
two, smaller ones would do as well, and where the tensors at the ends are larger, larger ones. ``cap_study.py`` has the
evidence. On nodes of 8 H100 alpha / beta is 0.7 MiB a rank from 64 ranks on.

Where buckets are planned anew from when gradients are ready (``core/bucketing.py``), the plan looks at backward alone.
But each bucket has a latency on its way home, too, and forward has half of backward's time to hide it. Counted once,
latencies make for too many buckets from some 512 ranks on; counted thrice, for no worse a plan than filled buckets.
"""

import math

from benchmarks.scale.networks import Network
from lightning_parstrat.core.cost_model import AlphaBeta, fit_alpha_beta

MIB = 2**20
SMALLEST = 8 * MIB
LARGEST = 512 * MIB
_SIZES = tuple(2**power for power in range(25, 30))
"""32 to 512 MiB, as large as caps are. Small ones travel by another protocol, LL, whose latency is half of LL128's and
whose bandwidth a tenth: a line through them says nothing of buckets."""


def wire_of(network: Network) -> AlphaBeta:
    """The line through the times of large reduce-scatters, as a calibration would fit it."""
    return fit_alpha_beta([(size, network.cost("reduce_scatter", size).seconds) for size in _SIZES]).model


def with_latencies(cost: AlphaBeta, times: float) -> AlphaBeta:
    """The cost for planning, with the latency counted so often."""
    return AlphaBeta(latency_seconds=times * cost.latency_seconds, seconds_per_byte=cost.seconds_per_byte)


def recommended_cap(
    model_bytes: int,
    cost: AlphaBeta,
    *,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    memory_bound: int | None = None,
) -> int:
    """The default cap of zero1_custom's buckets, in bytes: the power of two up to the root above.

    Args:
        model_bytes: What is reduced in a step.
        cost: What large reduce-scatters take over these ranks.
        smallest: Fewer bytes save next to nothing at the ends, and each bucket costs the host time.
        largest: Where nothing is hidden any more, the beginning of forward waits for a whole bucket.
        memory_bound: The most that the memory for a bucket in flight allows; it counts before the others.

    Returns:
        A power of two, unless bounded by another number: measured again, a line that is a little different mostly gives
        the same plan.
    """
    half_bytes = cost.latency_seconds / cost.seconds_per_byte if cost.seconds_per_byte else math.inf
    wanted = int(min(math.sqrt(model_bytes * half_bytes), largest))
    power = 1 << max(wanted.bit_length() - 1, 0)
    cap = min(max(power, smallest), largest)
    return cap if memory_bound is None else min(cap, memory_bound)
