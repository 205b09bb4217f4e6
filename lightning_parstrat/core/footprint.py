"""What a rank holds and sends under each strategy: the closed forms of docs/which_strategy.md.

Activations, padding of a few elements, and what kernels need for a moment are not counted. ZeRO: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3 and 5.
"""

from dataclasses import dataclass
from typing import NamedTuple

_BACKWARD = 2 / 3
"""Share of a step's computation that is backward: it computes gradients of inputs and of weights, twice a forward."""


class Widths(NamedTuple):
    """Bytes of an element under a precision of the Trainer."""

    parameter: int
    """As the module has it, and of its gradient."""
    cast: int
    """Of the copy that autocast makes of a weight, and keeps from forward to backward."""
    gathered: int
    """Of what ``zero3_custom`` gathers."""


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
    """What is trained, and by how many ranks.

    Args:
        parameters: Elements that are trained.
        values: Optimizer state of each of them, in values; Adam has 2.
        precision: The Trainer's; one of ``PRECISIONS``.
        nodes: Number of nodes.
        devices: Ranks of each node.
        shard_ranks: Ranks that share a copy of the state under ``zero1_custom``; by default all.
        micro_batches: Of a step.
        frozen: Elements of parameters that are not trained.
        buffers: Elements of buffers, which every rank holds.
        root: Of all parameters' elements those that ``zero3_custom`` gathers from the beginning of a step to its end.
        unit: Of all parameters' elements those of the largest unit that it gathers by itself.
        in_flight: Bytes of gradients that may be on their way at a time under ``zero2_custom``.
    """

    parameters: int
    values: float = 2.0
    precision: str = "32-true"
    nodes: int = 1
    devices: int = 1
    shard_ranks: int | None = None
    micro_batches: int = 1
    frozen: int = 0
    buffers: int = 0
    root: int = 0
    unit: int = 0
    in_flight: int = 0

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices

    @property
    def widths(self) -> Widths:
        """Bytes of an element."""
        return PRECISIONS[self.precision]

    @property
    def fixed_bytes(self) -> int:
        """Of what is not trained."""
        return self.widths.parameter * (self.frozen + self.buffers)


class Footprint(NamedTuple):
    """Bytes of one rank, and how what is sent lies beside what is computed.

    Attributes:
        strategy: Its flag.
        peak: The most within a step.
        held: Between steps: parameters, optimizer state, and gradients that are kept.
        accumulating: Between the micro-batches of a step.
        sent: Handed to collectives per step.
        on_link: Of that, and of what a node's other ranks send, what passes its link.
        reductions: How often a step reduces gradients.
        forwards: How many forwards of a step something is sent behind.
        behind_forward: Of what is sent, the part that is sent behind forwards.
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

    def step_seconds(self, compute_seconds: float, bytes_per_second: float, micro_batches: int = 1) -> float:
        """A step's time, if all communication that can hide behind computation does.

        DDP's all-reduce can hide behind the last backward alone. ``zero1_custom`` sends as much in two halves: each
        reduction hides behind its own backward, the all-gather behind the next forward. ``zero3_custom`` gathers in
        both.

        Args:
            compute_seconds: How long a step of one process takes without communication.
            bytes_per_second: Of a node's link, in each direction.
            micro_batches: Of a step.
        """
        seconds, of_one = self.on_link / bytes_per_second, compute_seconds / micro_batches
        forward = self.behind_forward * seconds - self.forwards * (1 - _BACKWARD) * of_one
        backward = (1 - self.behind_forward) * seconds - self.reductions * _BACKWARD * of_one
        return compute_seconds + max(0.0, forward) + max(0.0, backward)


def ddp(training: Training, tuned: bool) -> Footprint:
    """Under ``ddp_tuned``, whose gradients lie in its buckets; or under Lightning's ``ddp``, which copies them."""
    widths, count, ranks = training.widths, training.parameters, training.ranks
    # DDP never frees its buckets.
    held = ((2 if tuned else 3) + training.values) * widths.parameter * count + training.fixed_bytes
    sent = 2 * (ranks - 1) / ranks * widths.parameter * count
    return Footprint("ddp_tuned" if tuned else "ddp", held + widths.cast * count, held, held, sent, sent)


def zero1(training: Training, shards_gradients: bool = False) -> Footprint:
    """Under ``zero1_custom``, or ``zero2_custom``, which reduces every micro-batch and adds up in the shards."""
    widths, count = training.widths, training.parameters
    shards = training.shard_ranks or training.ranks
    # What is stepped: fp32 copies of parameters in 16 bits, else the parameters themselves.
    stepped = max(4, widths.parameter)
    masters = stepped if stepped > widths.parameter else 0
    whole, fixed = widths.parameter * count, training.fixed_bytes
    state = (masters + training.values * stepped) * count / shards
    held = fixed + whole + state + stepped * count / shards
    accumulating = held if shards_gradients else fixed + 2 * whole + state
    # Where the wire is slower than backward, all gradients wait for it at once.
    waiting = min(whole, training.in_flight) if shards_gradients else whole
    most_kept = max(held, accumulating) if training.micro_batches > 1 else held
    reductions = training.micro_batches if shards_gradients else 1
    phases = reductions + 1
    copies, nodes = training.ranks // shards, max(1, shards // training.devices)
    # Between the groups an all-reduce of each rank's shard, which all ranks of a node make at once.
    summed = 2 * (copies - 1) / copies * stepped * count / shards * reductions
    sent = phases * (shards - 1) / shards * whole + summed
    # In two levels K nodes send (K - 1) / K of a bucket per phase, however many ranks each node has.
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


def zero3(training: Training) -> Footprint:
    """Under ``zero3_custom``: torch's FSDP2, which steps what it shards in the dtype that the module has."""
    widths, count, ranks = training.widths, training.parameters, training.ranks
    every = count + training.frozen
    held = ((1 + training.values) * widths.parameter * count + widths.parameter * every) / ranks
    held += widths.parameter * training.buffers
    # The unit that computes and the one that is gathered next; gradients of one, and of another one on their way, in
    # fp32 and, where they travel in 16 bits, rounded beside it.
    packed = max(4, widths.parameter) + (widths.parameter if widths.parameter < 4 else 0)
    within = training.unit * (2 * widths.gathered + widths.parameter + packed)
    within += training.root * (widths.gathered + widths.parameter)
    # Autocast makes no copy of what is gathered in its dtype.
    cast = 0 if widths.gathered < widths.parameter else widths.cast * every
    share = training.micro_batches * (ranks - 1) / ranks
    forward = share * widths.gathered * every
    sent = forward + share * (widths.gathered * (every - training.root) + widths.parameter * count)
    return Footprint(
        "zero3_custom",
        held + within + cast,
        held,
        held,
        sent,
        # Around a ring of all ranks: as much leaves a node as a rank.
        sent,
        training.micro_batches,
        training.micro_batches,
        forward / sent if sent else 0.0,
    )
