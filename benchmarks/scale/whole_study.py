"""What parameters cost that stay uncut on one rank each, as Muon and Shampoo need them: a step of Muon, simulated.

    python -m benchmarks.scale.whole_study

- The update. Owners are those that the package chooses, by the operations of Muon's Newton-Schulz iterations. From as
  many ranks on as there are large matrices, the largest one's update is the floor, and others wait for its owner.
- The way to the owners. The package reduce-scatters equal parts and passes sums on by an all-to-all; the other way
  home. Beside it: a reduce to each owner and a broadcast from it, coalesced. One owner's network interface takes what
  is passed on; reduces take a ring's latency for each owner.

Seconds of communication are those of all buckets one after the other; backward and forward hide most of them.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.caps import wire_of
from benchmarks.scale.constants import GIGABYTE
from benchmarks.scale.networks import Nccl, placed
from lightning_parstrat.core.grouping import default_bucket_cap
from lightning_parstrat.core.layout import BucketLayout, LayoutPolicy, ParameterSpec, plan_buckets
from lightning_parstrat.core.update_cost import newton_schulz

RANKS = (8, 64, 256, 512, 1024)
FLOPS = 400e12
"""Operations a second that products of large matrices in bf16 reach."""
NEWTON_SCHULZ_STEPS = 5
WIDTH, INNER, LAYERS, ITEMSIZE = 4096, 11008, 32, 2


class Found(NamedTuple):
    """Of a step.

    Attributes:
        ranks: GPUs.
        owners: Ranks that own a matrix.
        shared_update_seconds: Of the update, if it were shared out evenly.
        update_seconds: Of the rank that takes longest.
        even_seconds: Of a reduce-scatter and an all-gather of each bucket, as where parameters are cut.
        passed_on_seconds: With what is passed on to owners and by them.
        reduced_seconds: Of reduces to owners and broadcasts from them.
        largest_receive_bytes: By the owner of most of a bucket, at once.
        copies_bytes: The same, if each rank sent it all of what it owns.
    """

    ranks: int
    owners: int
    shared_update_seconds: float
    update_seconds: float
    even_seconds: float
    passed_on_seconds: float
    reduced_seconds: float
    largest_receive_bytes: int
    copies_bytes: int


def matrices() -> list[ParameterSpec]:
    """Those of Llama 7B that Muon is for, last layer first; embeddings, norms and the head are AdamW's."""
    shapes = (*[(WIDTH, WIDTH)] * 4, *[(WIDTH, INNER)] * 3)
    return [
        ParameterSpec(
            name=f"{layer}.{number}",
            shape=shape,
            dtype="bfloat16",
            itemsize=ITEMSIZE,
            group=None,
            update_cost=newton_schulz(shape, NEWTON_SCHULZ_STEPS),
        )
        for layer in reversed(range(LAYERS))
        for number, shape in enumerate(shapes)
    ]


def found_at(ranks: int, specs: Sequence[ParameterSpec]) -> Found:
    """A step with so many GPUs."""
    network = Nccl(placement=placed(ranks))
    cap = default_bucket_cap(sum(spec.nbytes for spec in specs), wire_of(network))
    layouts = plan_buckets(specs, LayoutPolicy(world_size=ranks, bucket_cap_bytes=cap, partition="parameter"))
    costs = [0.0] * ranks
    for layout in layouts:
        for rank in range(ranks):
            costs[rank] += sum(specs[owned.parameter].update_cost or 0 for owned in layout.shard_slices(rank))
    even = sum(_both_ways(network, layout) for layout in layouts)
    owned = [max(_owned_bytes(layout)) for layout in layouts]
    return Found(
        ranks=ranks,
        owners=sum(cost > 0 for cost in costs),
        shared_update_seconds=sum(costs) / ranks / FLOPS,
        update_seconds=max(costs) / FLOPS,
        even_seconds=even,
        passed_on_seconds=even + sum(2 * _passed_on(network, size) for size in owned),
        reduced_seconds=sum(_by_owners(network, layout) for layout in layouts),
        largest_receive_bytes=max(
            layout.numel * ITEMSIZE * (ranks - 1) // ranks + size for layout, size in zip(layouts, owned, strict=True)
        ),
        copies_bytes=max(owned) * (ranks - 1),
    )


def _owned_bytes(layout: BucketLayout) -> list[int]:
    return [sum(piece.numel for piece in layout.shard_slices(rank)) * ITEMSIZE for rank in range(layout.world_size)]


def _both_ways(network: Nccl, layout: BucketLayout) -> float:
    size = layout.numel * ITEMSIZE
    return network.cost("reduce_scatter", size).seconds + network.cost("all_gather", size).seconds


def _passed_on(network: Nccl, owned: int) -> float:
    """The owner of most gets a part of it from each of the others, or sends it to them."""
    return network.cost("gather", owned // network.placement.ranks).seconds


def _by_owners(network: Nccl, layout: BucketLayout) -> float:
    """A ring's latency for each owner; all bytes go through all ranks."""
    bandwidth = min(network.bus_gbs, network.nic_gbs * network.placement.ranks_a_node)
    bandwidth = network.bus_gbs if network.placement.nodes == 1 else bandwidth
    owners = [size for size in _owned_bytes(layout) if size]
    latency = sum(network.cost("reduce_scatter", size).latency_seconds for size in owners)
    return 2 * (latency + sum(owners) / (bandwidth * GIGABYTE))


def markdown(found: Sequence[Found]) -> Iterator[str]:
    """The table, in milliseconds and MB."""
    yield "| N | owners | update: shared evenly / longest | cut / passed on / reduces | receives / copies |"
    yield "|---" * 5 + "|"
    for one in found:
        update = f"{1e3 * one.shared_update_seconds:.1f} / {1e3 * one.update_seconds:.1f}"
        ways = " / ".join(
            f"{1e3 * seconds:.0f}" for seconds in (one.even_seconds, one.passed_on_seconds, one.reduced_seconds)
        )
        memory = f"{one.largest_receive_bytes / 1e6:.0f} / {one.copies_bytes / 1e6:.0f}"
        yield f"| {one.ranks} | {one.owners} | {update} | {ways} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the numbers, as JSON")
    options = parser.parse_args()
    specs = matrices()
    found = [found_at(ranks, specs) for ranks in RANKS]
    print(*markdown(found), sep="\n")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        written = {"matrices": len(specs), "flops": FLOPS, "nic_gbs": constants.NIC_GBS}
        options.output.write_text(json.dumps({**written, "found": [one._asdict() for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
