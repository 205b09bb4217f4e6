"""What a collective takes, by its kind, its bytes and how many ranks there are: NCCL on GPUs, Gloo between CPUs.

A cost has two parts: a latency, which nothing shortens or shares, and a transfer, which other collectives on the same
wire slow down. Both are seconds. R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), derive the formulas of Gloo's; those of NCCL are its own (``constants.py``).
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from benchmarks.scale import constants
from benchmarks.scale.constants import GIGABYTE, MICROSECOND, PROTOCOLS, Algorithm, HostCpu, Level
from benchmarks.scale.constants import Protocol as NcclProtocol
from benchmarks.scale.events import Kind

Wire = Literal["NVLink", "network", "network in"]


class Placement(NamedTuple):
    """Ranks of a group, spread evenly over nodes."""

    ranks: int
    nodes: int = 1

    @property
    def ranks_a_node(self) -> float:
        return self.ranks / self.nodes


class Cost(NamedTuple):
    """What a collective takes alone.

    Attributes:
        latency_seconds: The part that does not depend on who else sends.
        transfer_seconds: The part in which it has a wire for itself, if it has.
        wire: Which one.
        how: Algorithm and protocol, or the name of the exchange.
    """

    latency_seconds: float
    transfer_seconds: float
    wire: Wire
    how: str

    @property
    def seconds(self) -> float:
        return self.latency_seconds + self.transfer_seconds


class Network(Protocol):
    """What carries the collectives of a group."""

    @property
    def blocks_host(self) -> bool:
        """Whether who waits for a collective is the host (Gloo), or the device's stream (NCCL)."""

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        """What a collective takes; ``nbytes`` is that of :class:`~benchmarks.scale.events.Launch`."""


def placed(ranks: int, ranks_a_node: int = constants.GPUS_A_NODE) -> Placement:
    """Ranks on as few nodes as hold them.

    Raises:
        ValueError: They do not fill their nodes.
    """
    nodes = math.ceil(ranks / ranks_a_node)
    if ranks % nodes:
        raise ValueError(f"Invalid ranks: {ranks}. Must fill nodes of {ranks_a_node}, or be fewer.")
    return Placement(ranks, nodes)


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL, by the model of its ``src/graph/tuning.cc``, whose minimum over algorithms and protocols it runs.

    NVLS, CollNet (SHARP) and PAT are left out: the first two want switches that not all have, and PAT one GPU a node.

    Args:
        placement: The group's ranks.
        bus_gbs: What NVLink carries in a node, in GB/s.
        nic_gbs: What the network interface of one GPU carries, in GB/s.
        host_cpu: Decides what LL reaches across nodes, and what posting to the network costs.
    """

    placement: Placement
    bus_gbs: float = constants.NVLINK_BUS_GBS
    nic_gbs: float = constants.NIC_GBS
    host_cpu: HostCpu = "as Hopper"

    @property
    def blocks_host(self) -> bool:
        return False

    @property
    def wire(self) -> Wire:
        """Across nodes a ring or tree is on NVLink, too, but the interface of the GPU is what groups share."""
        return "NVLink" if self.placement.nodes == 1 else "network"

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        if self.placement.ranks == 1:
            return Cost(0.0, 0.0, self.wire, "nothing")
        if kind in ("send", "recv", "gather", "scatter", "all_to_all"):
            return self._messages(kind, nbytes)
        algorithms: tuple[Algorithm, ...] = ("ring", "tree") if kind in ("all_reduce", "barrier") else ("ring",)
        return min(
            (self._estimate(kind, nbytes, algorithm, protocol) for algorithm in algorithms for protocol in PROTOCOLS),
            key=lambda cost: cost.seconds,
        )

    def _estimate(self, kind: Kind, nbytes: int, algorithm: Algorithm, protocol: NcclProtocol) -> Cost:
        """``ncclTopoGetAlgoTime``: a latency, and the bytes by the algorithm's bandwidth."""
        if algorithm == "ring":
            latency = self._ring_latency_us(kind, nbytes, protocol)
            bandwidth = self._ring_bandwidth_gbs(protocol) * self.placement.ranks / self._steps(kind)
        else:
            latency = self._tree_latency_us(protocol)
            # Up the tree and down again: every byte passes twice.
            bandwidth = self._tree_bandwidth_gbs(protocol) / 2 * tree_correction(protocol, nbytes)
        seconds = nbytes / (bandwidth * GIGABYTE)
        return Cost(latency * MICROSECOND, seconds, self.wire, f"{algorithm} {protocol}")

    def _steps(self, kind: Kind) -> int:
        """Of a ring: N - 1 hand every chunk to all, an all-reduce does so twice, a broadcast's pass N ranks."""
        ranks = self.placement.ranks
        if kind in ("all_reduce", "barrier"):
            return 2 * (ranks - 1)
        return ranks if kind == "broadcast" else ranks - 1

    def _ring_latency_us(self, kind: Kind, nbytes: int, protocol: NcclProtocol) -> float:
        """Base + the steps within nodes and between them; as many of the latter as there are nodes less one."""
        base, nodes = constants.NCCL_BASE_LATENCY_US["ring"].of(protocol), self.placement.nodes
        if kind == "broadcast":
            # Chunks follow each other through all ranks; NCCL counts one step where channels are alike in all nodes.
            return base + self._step_us("NVLink" if nodes == 1 else "network", "ring", protocol)
        steps = self._steps(kind)
        between = 0 if nodes == 1 else (2 if kind in ("all_reduce", "barrier") else 1) * (nodes - 1)
        within = self._step_us("NVLink", "ring", protocol)
        if nodes > 1:
            overheads = constants.NCCL_OVERHEADS_OF_SIMPLE if protocol == "Simple" else 1
            within = max(within, overheads * constants.NCCL_NETWORK_OVERHEAD_US[self.host_cpu])
        latency = base + (steps - between) * within + between * self._step_us("network", "ring", protocol)
        share = nbytes // (constants.NCCL_CHANNELS * self.placement.ranks)
        if kind == "all_reduce" and nodes > 1 and protocol == "Simple" and share >= constants.NCCL_PLATEAU_FROM_BYTES:
            latency *= constants.NCCL_PLATEAU_OF_RING
        return latency

    def _tree_latency_us(self, protocol: NcclProtocol) -> float:
        """Base + up and down: the chain within a node, and a binary tree of nodes."""
        ranks, nodes = self.placement
        within = (ranks // nodes - 1) * self._step_us("NVLink", "tree", protocol)
        between = int(math.log2(nodes)) * self._step_us("network", "tree", protocol)
        return constants.NCCL_BASE_LATENCY_US["tree"].of(protocol) + 2 * (within + between)

    def _step_us(self, level: Level, algorithm: Algorithm, protocol: NcclProtocol) -> float:
        # With one rank a node nothing hides the network: NCCL takes the tree's latency for the ring's, too.
        bare = level == "network" and self.placement.ranks_a_node == 1
        return constants.NCCL_STEP_LATENCY_US[level]["tree" if bare else algorithm].of(protocol)

    def _bus_gbs(self) -> float:
        """All interfaces of a node together carry what goes round, unless NVLink carries less."""
        if self.placement.nodes == 1:
            return self.bus_gbs
        return min(self.bus_gbs, self.nic_gbs * self.placement.ranks_a_node)

    def _ll_limit_gbs(self) -> float:
        if self.placement.nodes == 1:
            return constants.NCCL_LL_IN_NODE_GBS
        two, more = constants.NCCL_LL_ACROSS_NODES_GBS[self.host_cpu]
        return two if self.placement.nodes == 2 else more

    def _ring_bandwidth_gbs(self, protocol: NcclProtocol) -> float:
        bandwidth = self._bus_gbs() * constants.NCCL_RING_SHARE.of(protocol)
        return min(bandwidth, self._ll_limit_gbs()) if protocol == "LL" else bandwidth

    def _tree_bandwidth_gbs(self, protocol: NcclProtocol) -> float:
        alone = self.placement.nodes == 1
        shares = constants.NCCL_TREE_SHARE_IN_NODE if alone else constants.NCCL_TREE_SHARE_ACROSS_NODES
        bandwidth = self._bus_gbs() * constants.NCCL_TREE_SHARE * shares.of(protocol)
        return min(bandwidth, self._ll_limit_gbs()) if protocol == "LL" else bandwidth

    def _messages(self, kind: Kind, nbytes: int) -> Cost:
        """Messages between two ranks, under Simple; tuning.cc does not model them.

        One message is a base, a step and its bytes. Those of an all-to-all, a gather or a scatter run side by side and
        share what the rank has: NVLink for mates, the network interface for others.
        """
        ranks, nodes = self.placement
        mates, others = ranks // nodes - 1, ranks - ranks // nodes
        if kind in ("send", "recv"):
            mates, others = (1, 0) if nodes == 1 else (0, 1)
        chunk = nbytes / ranks if kind == "all_to_all" else nbytes
        level: Level = "network" if others else "NVLink"
        latency = constants.NCCL_BASE_LATENCY_US["ring"].Simple + self._step_us(level, "ring", "Simple")
        transfer = max(mates * chunk / (self.bus_gbs * GIGABYTE), others * chunk / (self.nic_gbs * GIGABYTE))
        wire: Wire = "network in" if kind in ("recv", "gather") else self.wire
        return Cost(latency * MICROSECOND, transfer, wire, "messages")


def tree_correction(protocol: NcclProtocol, nbytes: int) -> float:
    """What a tree reaches of its bandwidth at a size: NCCL looks it up by the power of two."""
    factors = constants.NCCL_TREE_CORRECTION[protocol]
    place = (nbytes // constants.NCCL_TREE_CORRECTION_FROM_BYTES).bit_length() - 1
    return factors[place] if 0 <= place < len(factors) else 1.0


@dataclass(frozen=True, kw_only=True)
class ShardGroups:
    """Shards within groups of ranks, replicas across: each kind of collective on the network that it is for.

    Args:
        within: Carries reduce-scatters and all-gathers.
        across: Carries all-reduces of shards.
        sums_wider: Whether sums are made in a dtype twice as wide as what is to be summed: by an all-to-all, or by a
            ring of what was widened, whichever takes less.
    """

    within: Network
    across: Network
    sums_wider: bool = False

    @property
    def blocks_host(self) -> bool:
        return self.within.blocks_host

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        if kind == "all_reduce":
            return self.across.cost(kind, 2 * nbytes if self.sums_wider else nbytes)
        if kind == "reduce_scatter" and self.sums_wider:
            ways = self.within.cost("all_to_all", nbytes), self.within.cost(kind, 2 * nbytes)
            return min(ways, key=lambda cost: cost.seconds)
        return self.within.cost(kind, nbytes)


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """Gloo over TCP between hosts, each with one interface that sends and receives at once.

    Args:
        ranks: Of the group.
        hop_seconds: From a rank's send to the other's receive, of no bytes.
        bytes_per_second: Of the interface.
        message_seconds: What each further message of an exchange costs the host that sends and receives it; by default
            a hop, as if they left one after the other.
        small_messages: How flags and norms are summed up: by Gloo's ring, or by recursive doubling.
        small_bytes: An all-reduce of at most so many bytes is such a message.
    """

    ranks: int
    hop_seconds: float = constants.GLOO_HOP_US * MICROSECOND
    bytes_per_second: float = constants.GLOO_GBS * GIGABYTE
    message_seconds: float | None = None
    small_messages: Literal["ring", "doubling"] = "ring"
    small_bytes: int = 64 * 1024

    @property
    def blocks_host(self) -> bool:
        return True

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        wire: Wire = "network in" if kind in ("recv", "gather") else "network"
        if self.ranks == 1:
            return Cost(0.0, 0.0, wire, "nothing")
        if kind == "all_reduce":
            if nbytes <= self.small_bytes and self.small_messages == "doubling":
                return self.doubling(nbytes)
            return self.ring_all_reduce(nbytes)
        if kind in ("reduce_scatter", "all_gather", "all_to_all"):
            return self.pairwise(nbytes)
        if kind == "barrier":
            return self._rounds(math.ceil(math.log2(self.ranks)), 0, "dissemination")
        if kind == "broadcast":
            return self._rounds(math.ceil(math.log2(self.ranks)), nbytes, "binomial tree")
        if kind in ("gather", "scatter"):
            messages = self.ranks - 1
            return Cost(self._messages(messages), messages * self._transfer(nbytes), wire, "messages")
        return Cost(self.hop_seconds, self._transfer(nbytes), wire, "message")

    def pairwise(self, nbytes: int) -> Cost:
        """What ``exchange.py`` does: N - 1 messages of a chunk each; each chunk goes to whoever needs it once."""
        transfer = self._transfer(nbytes) * (self.ranks - 1) / self.ranks
        return Cost(self._messages(self.ranks - 1), transfer, "network", "pairwise exchange")

    def ring_all_reduce(self, nbytes: int) -> Cost:
        """``gloo/allreduce.cc``: N - 1 hops sum, N - 1 hand round; 2 (N - 1) / N of the bytes."""
        hops = 2 * (self.ranks - 1)
        return Cost(hops * self.hop_seconds, self._transfer(nbytes) * hops / self.ranks, "network", "ring")

    def doubling(self, nbytes: int) -> Cost:
        """Partners at distances 1, 2, 4, ...: log2 N rounds of all bytes; two more where N is no power of two.

        What is beyond the power of two hands its part to a partner first, and gets the result last.
        """
        rounds = int(math.log2(self.ranks))
        return self._rounds(rounds + (0 if 2**rounds == self.ranks else 2), nbytes, "recursive doubling")

    def _rounds(self, rounds: int, nbytes: int, how: str) -> Cost:
        return Cost(rounds * self.hop_seconds, rounds * self._transfer(nbytes), "network", how)

    def _messages(self, count: int) -> float:
        """The first message takes a hop; each further one keeps the host busy for as long as it takes to handle."""
        further = self.hop_seconds if self.message_seconds is None else self.message_seconds
        return self.hop_seconds + (count - 1) * further

    def _transfer(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_second
