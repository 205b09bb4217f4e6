"""What of a step no computation hides, by closed forms: a latency and a time per byte for each collective.

The last bucket leaves after backward, and the first is gathered before forward; others travel meanwhile. So of each
half that much is exposed, with B equal buckets: max(one bucket's time, B buckets' time - computation * (B - 1) / B).

A ring of N ranks takes N - 1 steps of latency, and sends (N - 1) / N of the bytes; a tree takes log2 N. NCCL has rings
alone for a reduce-scatter and an all-gather, and for an all-reduce trees as well, whose bytes go twice.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from lightning_parstrat.core.bucket_cap import default_bucket_cap

MIB = 2**20
SIZES = (8, 64, 256, 512, 1024)

# A node of 8 H100, each with a network interface. NCCL 2.30.7, src/graph/tuning.cc, protocol LL128: seconds of a step
# of a ring or a tree, across nodes and within one, and what is left of the bus's bytes a second.
NODE = 8
RING_ACROSS, RING_WITHIN, TREE_ACROSS, TREE_WITHIN = 4e-6, 1.9e-6, 8.5e-6, 1.25e-6
BUS, INTERFACE = 0.92 * 360e9, 0.92 * 50e9
FLOPS, TOKENS = 400e12, 4096


class Model(NamedTuple):
    """What is trained: parameters, and bytes of each on the wire."""

    name: str
    parameters: float
    itemsize: int

    @property
    def nbytes(self) -> float:
        return self.parameters * self.itemsize

    def exposed(self, buckets: int, of_a_bucket: float, forwards: int) -> float:
        """Seconds of one half that nothing hides; a backward computes as long as two forwards."""
        computing = forwards * 2 * self.parameters * TOKENS / FLOPS
        return max(of_a_bucket, buckets * of_a_bucket - computing * (buckets - 1) / buckets)


MODELS = (Model("350M fp32", 355e6, 4), Model("7B bf16", 6.74e9, 2))


def ring(nbytes: float, ranks: int) -> float:
    """A reduce-scatter, or an all-gather."""
    nodes = math.ceil(ranks / NODE)
    steps = (ranks - nodes) * RING_WITHIN + (nodes * RING_ACROSS if nodes > 1 else 0.0)
    return steps + nbytes * (ranks - 1) / ranks / BUS


def all_reduce(nbytes: float, ranks: int) -> float:
    """By a tree, or by a ring: whichever is faster."""
    up = math.ceil(math.log2(ranks / NODE)) * TREE_ACROSS + (NODE - 1) * TREE_WITHIN
    return min(2 * up + 2 * nbytes / BUS, 2 * ring(nbytes, ranks))


def between_groups(nbytes: float, copies: int) -> float:
    """An all-reduce of a shard among as many ranks, each of another node; all interfaces of a node are in use."""
    return 2 * math.ceil(math.log2(copies)) * TREE_ACROSS + 2 * nbytes * (copies - 1) / copies / INTERFACE


def ddp(model: Model, ranks: int) -> float:
    buckets = math.ceil(model.nbytes / (25 * MIB))
    return model.exposed(buckets, all_reduce(model.nbytes / buckets, ranks), 2)


def zero1(model: Model, ranks: int, cap: float | None = None, group: int | None = None) -> float:
    """Of ``zero1_custom``, with the default cap of buckets; in shard groups of so many ranks."""
    sharing = min(group or ranks, ranks)
    copies = ranks // sharing
    cap = cap or default_bucket_cap(int(model.nbytes), sharing, "cuda", copies)
    buckets = math.ceil(model.nbytes / cap)
    home = ring(model.nbytes / buckets, sharing)
    out = home + between_groups(model.nbytes / buckets / sharing, copies)
    return model.exposed(buckets, out, 2) + model.exposed(buckets, home, 1)


def table() -> Iterator[str]:
    """Milliseconds a step, by the number of ranks."""
    yield f"| GPUs | {' | '.join(f'{model.name}: `ddp` / default / 8 MiB / groups of 64' for model in MODELS)} |"
    yield "|---" * (1 + len(MODELS)) + "|"
    for ranks in SIZES:
        cells = []
        for model in MODELS:
            found = ddp(model, ranks), zero1(model, ranks), zero1(model, ranks, 8 * MIB), zero1(model, ranks, group=64)
            cells.append(" / ".join(f"{1e3 * seconds:.{2 if seconds < 0.01 else 0}f}" for seconds in found))
        yield f"| {ranks:,} | {' | '.join(cells)} |"
