"""What the rule of ``caps.py`` comes to, beside DDP and beside the best cap.

python -m benchmarks.scale.cap_study
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.caps import recommended_cap, wire_of
from benchmarks.scale.networks import placed
from benchmarks.scale.simulator import accelerator
from benchmarks.scale.study import CAPS, RANKS, Cluster, ddp_step, zero1_step
from benchmarks.scale.synthetic import MIB, Model, even_model, gpt2_medium, llama_7b


class Evidence(NamedTuple):
    """Exposed seconds of a step.

    Attributes:
        ranks: GPUs.
        half_bytes: alpha / beta of the wire.
        cap_bytes: The rule's.
        ddp: Of DDP with its default buckets.
        recommended: With the rule's cap, and buckets filled up to it.
        replanned: With the rule's cap, and buckets planned anew from when gradients are ready.
        bound: The least over all caps, with either plan.
    """

    ranks: int
    half_bytes: float
    cap_bytes: int
    ddp: float
    recommended: float
    replanned: float
    bound: float

    @property
    def to_ddp(self) -> float:
        return self.recommended / self.ddp

    @property
    def to_bound(self) -> float:
        return self.recommended / self.bound


def evidence(model: Model, ranks: int, nic_gbs: float = constants.NIC_GBS, caps: Sequence[int] = CAPS) -> Evidence:
    """Compares the rule's cap with DDP and with the best of ``caps``.

    Args:
        model: The tensors.
        ranks: GPUs.
        nic_gbs: What the network interface of each carries, in GB/s.
        caps: Those that the bound is taken over, besides the rule's.
    """
    cluster = Cluster(machine=accelerator(model.itemsize), nic_gbs=nic_gbs)
    wire = wire_of(cluster.network(placed(ranks)))
    cap = recommended_cap(model.nbytes, wire)

    def exposed(cap_bytes: int, replanned: bool) -> float:
        return zero1_step(model, ranks, cap_bytes, cluster, replanned=replanned).exposed_seconds

    return Evidence(
        ranks,
        wire.latency_seconds / wire.seconds_per_byte,
        cap,
        ddp_step(model, ranks, cluster).exposed_seconds,
        exposed(cap, replanned=False),
        exposed(cap, replanned=True),
        min(exposed(other, replanned) for other in {cap, *caps} for replanned in (False, True)),
    )


def markdown(found: Sequence[Evidence]) -> Iterator[str]:
    """The table: MiB, milliseconds, and ratios of the rule's exposed time."""
    yield "| N | alpha / beta | cap | exposed: DDP | rule | replanned | best cap | rule to DDP | rule to best |"
    yield "|---" * 9 + "|"
    for one in found:
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (one.ddp, one.recommended, one.replanned, one.bound))
        sizes = f"{one.half_bytes / MIB:.0f} | {one.cap_bytes // MIB}"
        yield f"| {one.ranks} | {sizes} | {times} | {one.to_ddp:.2f} | {one.to_bound:.2f} |"


def main() -> None:
    for model in (gpt2_medium(), llama_7b(), even_model("350M fp32 in tensors of 1 MiB", 350_000_000, 4)):
        for nic_gbs in (constants.NIC_GBS, constants.NIC_GBS / 4):
            print(f"{model.name}, {nic_gbs:g} GB/s a GPU:\n")
            print(*markdown([evidence(model, ranks, nic_gbs) for ranks in RANKS]), "", sep="\n")


if __name__ == "__main__":
    main()
