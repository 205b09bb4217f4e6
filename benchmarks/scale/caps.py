"""What a wire is taken to cost where buckets are planned.

The package's default cap (:func:`~lightning_parstrat.core.grouping.default_bucket_cap`) is a root of the model's bytes
and of alpha / beta: of the straight line through what large reduce-scatters take. Where everything is hidden but the
ends of a step, smaller ones would do as well, and where the tensors at the ends are larger, larger ones.
``cap_study.py`` has the evidence. On nodes of 8 H100 alpha / beta is 0.7 MiB a rank from 64 ranks on.

Where buckets are planned anew from when gradients are ready (``core/bucketing.py``), the plan looks at backward alone.
But each bucket has a latency on its way home, too, and forward has half of backward's time to hide it. Counted once,
latencies make for too many buckets from some 512 ranks on; counted thrice, for no worse a plan than filled buckets.
"""

from benchmarks.scale.networks import Network
from lightning_parstrat.core.cost_model import AlphaBeta, fit_alpha_beta

_SIZES = tuple(2**power for power in range(25, 30))
"""32 to 512 MiB, as large as caps are. Small ones travel by another protocol, LL, whose latency is half of LL128's and
whose bandwidth a tenth: a line through them says nothing of buckets."""


def wire_of(network: Network) -> AlphaBeta:
    """The line through the times of large reduce-scatters, as a calibration would fit it."""
    return fit_alpha_beta([(size, network.cost("reduce_scatter", size).seconds) for size in _SIZES]).model


def with_latencies(cost: AlphaBeta, times: float) -> AlphaBeta:
    """The cost for planning, with the latency counted so often."""
    return AlphaBeta(latency_seconds=times * cost.latency_seconds, seconds_per_byte=cost.seconds_per_byte)
