"""The bytes that a rank holds and sends under each strategy: the closed forms of docs/which_strategy.md.

Three things are not counted: activations, padding of a few elements, and temporary memory of kernels. ZeRO: Rajbhandari
et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3 and 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_parstrat.core.grid import Grid

_BACKWARD = 2 / 3
"""Share of backward in a step's computation. A backward computes gradients of inputs and of weights: two forwards."""


class Widths(NamedTuple):
    """Bytes of an element under a precision of the Trainer."""

    parameter: int
    """Of a parameter as the module has it, and of its gradient."""
    cast: int
    """Of the copy that autocast makes of a weight. Autocast keeps that copy from forward to backward."""
    gathered: int
    """Of a block's parameter as ``zero3_custom`` gathers it. The root's are gathered as the module has them."""


PRECISIONS = {
    "32-true": Widths(4, 0, 4),
    "bf16-mixed": Widths(4, 2, 2),
    "16-mixed": Widths(4, 2, 4),
    "bf16-true": Widths(2, 0, 2),
    "16-true": Widths(2, 0, 2),
    "64-true": Widths(8, 0, 8),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The size of a training, and its number of ranks.

    Args:
        parameters: Elements that are trained.
        values: Optimizer state of each trained element, in values. Adam has 2.
        precision: The Trainer's precision, one of ``PRECISIONS``.
        nodes: Number of nodes.
        devices: Ranks of each node.
        shard_ranks: Ranks that share a copy of what is sharded. By default, all. Ranks that share layers are one.
        tensor_ranks: Ranks that share each layer that a tensor-parallel plan names, under ``zero3_custom``.
        cut: Elements of these layers.
        micro_batches: Micro-batches of a step.
        frozen: Elements of parameters that are not trained.
        buffers: Elements of buffers, which every rank holds.
        root: Elements that ``zero3_custom`` gathers from the beginning of a step to its end.
        unit: Elements of the largest unit that ``zero3_custom`` gathers by itself.
        in_flight: Bytes of gradients that may be in flight at a time under ``zero2_custom``.
        stages: Trained elements of the largest stage under ``pipeline_custom``, by the number of stages. By default,
            an equal part.
        activations: Bytes of the activations that one stage sends for a batch. 0 if they are not known.
        pieces: Micro-batches into which ``pipeline_custom`` cuts a batch.
    """

    parameters: int
    values: float = 2.0
    precision: str = "32-true"
    nodes: int = 1
    devices: int = 1
    shard_ranks: int | None = None
    tensor_ranks: int = 1
    cut: int = 0
    micro_batches: int = 1
    frozen: int = 0
    buffers: int = 0
    root: int = 0
    unit: int = 0
    in_flight: int = 0
    stages: Mapping[int, int] = field(default_factory=dict)
    activations: float = 0.0
    pieces: int = 4

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.devices

    @property
    def widths(self) -> Widths:
        """Bytes of an element."""
        return PRECISIONS[self.precision]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything that is not trained."""
        return self.widths.parameter * (self.frozen + self.buffers)


class Footprint(NamedTuple):
    """Bytes of one rank, and how communication overlaps with computation.

    Attributes:
        strategy: The strategy's flag.
        peak: The most within a step.
        held: Between steps: parameters, optimizer state, and gradients that are kept.
        accumulating: Between the micro-batches of a step.
        sent: Bytes handed to collectives per step.
        on_link: Bytes per step that pass the link of the rank's node, those of the node's other ranks included.
        reductions: How often a step reduces gradients.
        forwards: How many forwards of a step communication hides behind.
        behind_forward: The share of ``sent`` that is sent behind forwards.
        stages: Ranks whose stages one batch passes, instead of a batch each.
        pieces: Micro-batches into which they cut it.
        sharing: Ranks that share layers, and so a batch.
        summed: The part of ``on_link`` that is sent when the last backward has ended.
    """

    strategy: str
    peak: float
    held: float
    accumulating: float
    sent: float
    on_link: float
    reductions: int = 1
    forwards: int = 1
    behind_forward: float = 0.0
    stages: int = 1
    pieces: int = 1
    sharing: int = 1
    summed: float = 0.0

    def step_seconds(self, compute_seconds: float, bytes_per_second: float, micro_batches: int = 1) -> float:
        """A step's time, if all communication that can hide behind computation does.

        DDP's all-reduce can hide behind the last backward alone. ``zero1_custom`` sends as much in two halves. Each
        reduction hides behind its own backward, and the all-gather behind the next forward. ``zero3_custom`` gathers in
        both.

        Args:
            compute_seconds: How long a step of one process takes without communication.
            bytes_per_second: Speed of a node's link, in each direction.
            micro_batches: Micro-batches of a step.
        """
        computed = compute_seconds / self.sharing
        if self.stages > 1:
            # The first piece passes all stages before the last stage is busy: GPipe, section 2.3.
            rounds = (self.pieces + self.stages - 1) / self.pieces
            passed = (self.on_link - self.summed) / bytes_per_second
            return rounds * (computed / self.stages + passed) + self.summed / bytes_per_second
        seconds, of_one = self.on_link / bytes_per_second, computed / micro_batches
        forward = self.behind_forward * seconds - self.forwards * (1 - _BACKWARD) * of_one
        backward = (1 - self.behind_forward) * seconds - self.reductions * _BACKWARD * of_one
        return computed + max(0.0, forward) + max(0.0, backward)


def ddp(training: Training, tuned: bool) -> Footprint:
    """Under ``ddp_tuned``, gradients lie in its buckets. Lightning's ``ddp`` copies gradients into buckets."""
    widths, count, ranks = training.widths, training.parameters, training.ranks
    # DDP never frees its buckets.
    held = ((2 if tuned else 3) + training.values) * widths.parameter * count + training.fixed_bytes
    sent = 2 * (ranks - 1) / ranks * widths.parameter * count
    return Footprint("ddp_tuned" if tuned else "ddp", held + widths.cast * count, held, held, sent, sent)


def zero1(training: Training, shards_gradients: bool = False) -> Footprint:
    """Under ``zero1_custom``, or ``zero2_custom``, which reduces every micro-batch and adds up in the shards."""
    widths, count = training.widths, training.parameters
    shards = training.shard_ranks or training.ranks
    # Bytes of a stepped element: of fp32 copies of 16-bit parameters, otherwise of the parameters themselves.
    stepped = max(4, widths.parameter)
    masters = stepped if stepped > widths.parameter else 0
    whole, fixed = widths.parameter * count, training.fixed_bytes
    state = (masters + training.values * stepped) * count / shards
    held = fixed + whole + state + stepped * count / shards
    accumulating = held if shards_gradients else fixed + 2 * whole + state
    # If the network is slower than backward, all gradients wait for it at once.
    waiting = min(whole, training.in_flight) if shards_gradients else whole
    most_kept = max(held, accumulating) if training.micro_batches > 1 else held
    reductions = training.micro_batches if shards_gradients else 1
    phases = reductions + 1
    copies, nodes = training.ranks // shards, max(1, shards // training.devices)
    # Between the groups, each rank's shard is all-reduced. All ranks of a node do that at once.
    summed = 2 * (copies - 1) / copies * stepped * count / shards * reductions
    sent = phases * (shards - 1) / shards * whole + summed
    # With two levels, K nodes send (K - 1) / K of a bucket per phase. The number of ranks on a node does not matter.
    on_link = phases * (nodes - 1) / nodes * whole + summed * training.devices if training.nodes > 1 else sent
    return Footprint(
        "zero2_custom" if shards_gradients else "zero1_custom",
        max(most_kept + widths.cast * count, held + waiting),
        held,
        accumulating,
        sent,
        on_link,
        reductions,
        behind_forward=1 / phases,
    )


def outer(training: Training, every: int) -> Footprint:
    """Under ``zero1_custom`` with ``outer_every``: shard groups train alone. In turns, they send how far they moved.

    Args:
        training: The training.
        every: After how many steps groups meet.
    """
    shards, width = training.shard_ranks or training.ranks, max(4, training.widths.parameter)
    devices, copies = min(training.devices, shards), training.ranks // shards
    alone = zero1(replace(training, nodes=shards // devices, devices=devices, shard_ranks=shards))
    # Global parameters. Their momentum, if there is any, takes as much again.
    kept = width * training.parameters / shards
    met = 2 * (copies - 1) / copies * width * training.parameters / shards / every
    is_on_node = training.nodes > 1 and shards <= training.devices
    return alone._replace(
        strategy=f"zero1_custom outer_every={every}",
        peak=alone.peak + kept,
        held=alone.held + kept,
        accumulating=alone.accumulating + kept,
        sent=alone.sent + met,
        on_link=(0 if is_on_node else alone.on_link) + met * (training.devices if training.nodes > 1 else 1),
    )


def zero3(training: Training) -> Footprint:
    """Under ``zero3_custom``: torch's FSDP2. FSDP2 steps its shards in the dtype that the module has."""
    widths, of_data = training.widths, training.ranks // training.tensor_ranks
    shards = training.shard_ranks or of_data
    # The elements of this rank's parts of layers, as if all parameters were cut alike.
    left = 1 - (1 - 1 / training.tensor_ranks) * training.cut / (training.parameters + training.frozen)
    count, every = left * training.parameters, left * (training.parameters + training.frozen)
    unit, root = left * training.unit, left * training.root
    held = ((1 + training.values) * widths.parameter * count + widths.parameter * every) / shards
    held += widths.parameter * training.buffers
    # The unit that computes, and the one that is gathered next. Gradients of one unit, and of another one in flight, in
    # fp32. If gradients travel in 16 bits, a rounded copy beside the fp32 one.
    packed = max(4, widths.parameter) + (widths.parameter if widths.parameter < 4 else 0)
    within = unit * (2 * widths.gathered + widths.parameter + packed)
    within += root * 2 * widths.parameter
    # Autocast makes no copy of parameters that are gathered in its dtype.
    cast = widths.cast * (root if widths.gathered < widths.parameter else every)
    share = training.micro_batches * (shards - 1) / shards
    of_units = share * widths.gathered * (every - root)
    forward = of_units + share * widths.parameter * root
    within_group = forward + of_units + share * widths.parameter * count
    # Between the groups, each rank's shard of a sum is all-reduced.
    copies = of_data // shards
    summed = training.micro_batches * 2 * (copies - 1) / copies * max(4, widths.parameter) * count / shards
    sent = within_group + summed
    # A ring of a group's ranks: as many bytes leave a node as leave a rank, unless the group is on one node.
    is_on_node = shards * training.tensor_ranks <= training.devices
    on_link = (0 if is_on_node else within_group * training.tensor_ranks) + summed * training.devices
    return Footprint(
        "zero3_custom",
        held + within + cast,
        held,
        held,
        sent,
        on_link if training.nodes > 1 else sent,
        training.micro_batches,
        training.micro_batches,
        forward / sent if sent else 0.0,
        sharing=training.tensor_ranks,
    )


def pipeline(training: Training, grid: Grid) -> Footprint:
    """Under ``pipeline_custom``, a rank has a stage's parameters, gradients and state. Middle stages send both ways.

    The ranks of a stage divide the state, or all three if they share layers.
    """
    widths, stages, data = training.widths, grid.pipeline, grid.data
    left = 1 - (1 - 1 / grid.tensor) * training.cut / (training.parameters + training.frozen)
    count = left * training.stages.get(stages, training.parameters / stages)
    fixed = widths.parameter * (left * training.frozen / stages + training.buffers)
    whole = widths.parameter * count
    is_fsdp = grid.tensor > 1
    # Between steps gradients are in shards, and within one they are whole.
    held = fixed + whole / (data if is_fsdp else 1) + (1 + training.values) * whole / data
    within = 0.0 if data == 1 else (2 if is_fsdp else 1) * whole
    passed = training.activations * training.micro_batches
    # Blocks' gradients are reduced once for each batch.
    reductions = training.micro_batches if is_fsdp else 1
    summed = reductions * 2 * (data - 1) / data * whole
    # Several ranks of a node have the next stage on another node. Ranks with other data may be on one node.
    of_stage, devices = data * grid.tensor, training.devices
    nodes = max(1, of_stage // devices)
    summed_on_link = reductions * 2 * (nodes - 1) / nodes * whole * grid.tensor if training.nodes > 1 else summed
    both_ways = passed * (2 if stages > 2 else 1)
    # If stages lie on two nodes, or on two groups of nodes, each sends one way.
    passed_on_link = (both_ways if training.nodes > 2 * nodes else passed) * min(devices, of_stage)
    on_link = passed_on_link if training.nodes > 1 else both_ways
    name = "pipeline_custom" if of_stage == 1 else f"pipeline_custom {stages} x {data} x {grid.tensor}"
    return Footprint(
        name,
        held + within + widths.cast * count,
        held,
        held + (0 if is_fsdp or data == 1 else whole),
        both_ways + summed,
        on_link + summed_on_link,
        stages=stages,
        pieces=training.pieces,
        sharing=grid.tensor,
        summed=summed_on_link,
    )


def grids(ranks: int, tensor: int) -> list[Grid]:
    """All ways to divide ranks into pipelines of two stages or more, if so many ranks share layers."""
    sizes = (size for size in range(ranks // tensor, 1, -1) if ranks % (size * tensor) == 0)
    return [Grid(ranks=ranks, pipeline=size, tensor=tensor) for size in sizes]
