"""What the rule of ``caps.py`` comes to, beside DDP and beside the best cap.

python -m benchmarks.scale.cap_study
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.caps import wire_of
from benchmarks.scale.networks import placed
from benchmarks.scale.simulator import accelerator
from benchmarks.scale.study import CAPS, RANKS, Cluster, ddp_step, zero1_step
from benchmarks.scale.synthetic import MIB, Model, even_model, gpt2_medium, llama_7b
from lightning_parstrat.core.grouping import default_bucket_cap


class Evidence(NamedTuple):
    """Exposed seconds of a step.

    Attributes:
        ranks: GPUs.
        half_bytes: alpha / beta of the wire.
        cap_bytes: The rule's.
        ddp: Of DDP with its default buckets.
        filled: With the rule's cap, and buckets filled up to it.
        replanned: With the rule's cap, and buckets planned anew from when gradients are ready.
        counted_thrice: The same, with the latency of each bucket counted three times.
        bound: The least over all caps and these three plans.
    """

    ranks: int
    half_bytes: float
    cap_bytes: int
    ddp: float
    filled: float
    replanned: float
    counted_thrice: float
    bound: float

    @property
    def plans(self) -> tuple[float, float, float]:
        return self.filled, self.replanned, self.counted_thrice


LATENCIES = (None, 1, 3)
"""How often the latency counts in the three plans; see :func:`~benchmarks.scale.study.zero1_step`."""


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
    cap = default_bucket_cap(model.nbytes, wire)

    def exposed(cap_bytes: int) -> list[float]:
        return [zero1_step(model, ranks, cap_bytes, cluster, None, times).exposed_seconds for times in LATENCIES]

    filled, replanned, thrice = exposed(cap)
    others = [seconds for other in caps if other != cap for seconds in exposed(other)]
    return Evidence(
        ranks,
        wire.latency_seconds / wire.seconds_per_byte,
        cap,
        ddp_step(model, ranks, cluster).exposed_seconds,
        filled,
        replanned,
        thrice,
        min([filled, replanned, thrice, *others]),
    )


def markdown(found: Sequence[Evidence]) -> Iterator[str]:
    """The table: MiB and exposed milliseconds, and how the rule's cap with each of the three plans compares."""
    yield "| N | alpha / beta | cap | DDP | filled | replanned | latency thrice | best | to DDP | to best |"
    yield "|---" * 10 + "|"
    for one in found:
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (one.ddp, *one.plans, one.bound))
        sizes = f"{one.half_bytes / MIB:.0f} | {one.cap_bytes // MIB}"
        to_ddp, to_bound = (" / ".join(f"{plan / other:.2f}" for plan in one.plans) for other in (one.ddp, one.bound))
        yield f"| {one.ranks} | {sizes} | {times} | {to_ddp} | {to_bound} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the numbers, as JSON")
    options = parser.parse_args()
    written: dict[str, Any] = {}
    for model in (gpt2_medium(), llama_7b(), even_model("350M fp32 in tensors of 1 MiB", 350_000_000, 4)):
        for nic_gbs in (constants.NIC_GBS, constants.NIC_GBS / 4):
            title = f"{model.name}, {nic_gbs:g} GB/s a GPU"
            found = [evidence(model, ranks, nic_gbs) for ranks in RANKS]
            print(f"{title}:\n", *markdown(found), "", sep="\n")
            written[title] = [one._asdict() for one in found]
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
