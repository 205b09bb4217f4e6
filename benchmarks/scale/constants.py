"""What the simulator takes for given: latencies, bandwidths and a machine, each with where it comes from.

"tuning.cc" is ``src/graph/tuning.cc`` of NCCL 2.30.7 (github.com/NVIDIA/nccl, tag v2.30.7-1): the numbers by which NCCL
itself estimates a collective before it chooses an algorithm and a protocol. Those of rings and trees are the same in
2.27.7. "The scale reading" is a reading of this package's sources of November 2026 whose table
``tests/benchmarks/test_simulator.py`` holds the simulator to; what it assumes of a machine was measured by nobody here.

Latencies are seconds here (tuning.cc: microseconds), bandwidths bytes per second (tuning.cc: GB/s, of 10^9 bytes).
"""

from typing import Literal, NamedTuple

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
Level = Literal["NVLink", "network"]
HostCpu = Literal["Intel", "AMD", "as Hopper"]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

MICROSECOND = 1e-6
GIGABYTE = 1e9
MIB = 2**20


class ByProtocol(NamedTuple):
    """One number for each of NCCL's protocols."""

    LL: float
    LL128: float
    Simple: float

    def of(self, protocol: Protocol) -> float:
        return self[PROTOCOLS.index(protocol)]


# tuning.cc, baseLatencies, Tree and Ring.
NCCL_BASE_LATENCY_US: dict[Algorithm, ByProtocol] = {
    "tree": ByProtocol(6.8, 14.0, 8.4),
    "ring": ByProtocol(6.6, 14.0, 8.4),
}

# tuning.cc, hwLatencies, NVLINK and NET: what one step of the algorithm takes on a wire of that level.
NCCL_STEP_LATENCY_US: dict[Level, dict[Algorithm, ByProtocol]] = {
    "NVLink": {"tree": ByProtocol(0.6, 1.25, 4.0), "ring": ByProtocol(0.6, 1.9, 3.4)},
    "network": {"tree": ByProtocol(5.0, 8.5, 14.0), "ring": ByProtocol(2.7, 4.0, 14.0)},
}

# tuning.cc, getNetOverhead: every step of a ring across nodes takes at least this, three times it under Simple.
NCCL_NETWORK_OVERHEAD_US: dict[HostCpu, float] = {"Intel": 1.0, "AMD": 2.0, "as Hopper": 1.0}
NCCL_OVERHEADS_OF_SIMPLE = 3

# tuning.cc, llMaxBws: the most that LL carries; of a node by its GPU's generation (Hopper), else by the host's CPU and
# whether there are two nodes or more. The scale reading took Hopper's row across nodes, too, where tuning.cc takes that
# of the CPU; "as Hopper" does as the reading did.
NCCL_LL_IN_NODE_GBS = 141.0
NCCL_LL_ACROSS_NODES_GBS: dict[HostCpu, tuple[float, float]] = {
    "Intel": (39.0, 20.4),
    "AMD": (22.5, 19.0),
    "as Hopper": (45.0, 35.0),
}

# tuning.cc, ncclTopoTuneModel: what is left of the bus's bandwidth. LL sends as much flag as data; LL128 120 bytes of
# 128 (0.92 of a ring). A tree reaches 0.92 of the bus, and of that LL 1 / 3.8, LL128 7 / 9 in a node or 120 / 128.
NCCL_RING_SHARE = ByProtocol(0.5, 0.92, 1.0)
NCCL_TREE_SHARE = 0.92
NCCL_TREE_SHARE_IN_NODE = ByProtocol(1 / 3.8, 7 / 9, 1.0)
NCCL_TREE_SHARE_ACROSS_NODES = ByProtocol(1 / 3.8, 120 / 128, 1.0)

# tuning.cc, treeCorrectionFactor: a tree's share of its bandwidth by size, from 64 bytes, one number for each doubling;
# from 512 MiB on a tree has all of it.
NCCL_TREE_CORRECTION: dict[Protocol, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
NCCL_TREE_CORRECTION_FROM_BYTES = 64

# tuning.cc, ncclTopoGetAlgoTime: a ring all-reduce across nodes under Simple, from 64 bytes a channel and rank on, on
# GPUs since Ampere.
NCCL_PLATEAU_OF_RING = 1.4
NCCL_PLATEAU_FROM_BYTES = 64

# src/graph/search.cc, sm90SpeedArrayIntra: rings of an H100 node are found at up to 60 GB/s a channel and then doubled
# in number; 24 channels share 360 GB/s. Used for the plateau alone: the limits per channel that tuning.cc has beside it
# (29 GB/s and more on Hopper) bind no channel of 15.
NCCL_CHANNELS = 24

# The scale reading: a node of 8 GPUs (H100), one NIC a GPU.
GPUS_A_NODE = 8
NVLINK_BUS_GBS = 360.0
NIC_GBS = 50.0
FLOPS = 400e12
TOKENS_A_GPU = 4096

# NVIDIA's H100 SXM data sheet: 3.35 TB/s of HBM3. An update of AdamW in fp32 reads a gradient, a weight and two
# moments, and writes all but the gradient.
HBM_GBS = 3350.0
UPDATE_ACCESSES = 7

# The scale reading: a hop of Gloo between two hosts. Its ring all-reduce (gloo/allreduce.cc) has 2 (N - 1) of them.
GLOO_HOP_US = 40.0
# Ethernet of 10 Gbit/s: an assumption for where nothing has been measured.
GLOO_GBS = 1.25

# What a rank's processor does in a step of 60 tensors over Gloo, and for each message: ``scale_counts.json`` of
# 2026-11-22, "forked": 12.5 ms at 2 ranks (8 messages), 17.2 at 8 (56), 42.3 at 32 (248) under zero1_custom.
GLOO_HOST_MS = 12.0
GLOO_MESSAGE_US = 110.0
