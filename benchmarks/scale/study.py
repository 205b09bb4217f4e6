"""How long a step of zero1_custom and of DDP takes on 2 to 1,024 GPUs, and what larger buckets or shard groups gain.

    python -m benchmarks.scale.study [--output results.json] [--picture results.png]

Nothing is measured: steps are played through by ``simulator.py``, on the machine of ``constants.py``.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.caps import wire_of, with_latencies
from benchmarks.scale.constants import HostCpu
from benchmarks.scale.networks import Gloo, Nccl, Network, Placement, ShardGroups, placed
from benchmarks.scale.simulator import Machine, Step, accelerator, steady_step
from benchmarks.scale.synthetic import MIB, Model, Replan, ddp_record, gpt2_medium, llama_7b, sharded_plan, zero1_record
from lightning_parstrat.core.grouping import default_bucket_cap

RANKS = (2, 8, 16, 32, 64, 128, 256, 512, 1024)
CAPS = tuple(2**power * MIB for power in range(3, 12))
"""8 MiB to 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a training runs on.

    Args:
        machine: Computes.
        nic_gbs: What the network interface of each GPU carries, in GB/s.
        host_cpu: See :class:`~benchmarks.scale.networks.Nccl`.
        flags: How the flags at the end of backward are sent: not at all, or by Gloo between hosts.
        sums_wider: See :class:`~benchmarks.scale.networks.ShardGroups`.
    """

    machine: Machine
    nic_gbs: float = constants.NIC_GBS
    host_cpu: HostCpu = "Intel"
    flags: Literal["none", "ring", "doubling"] = "none"
    sums_wider: bool = False

    def network(self, placement: Placement) -> Nccl:
        return Nccl(placement=placement, nic_gbs=self.nic_gbs, host_cpu=self.host_cpu)


def cluster_for(model: Model) -> Cluster:
    """The GPUs of ``constants.py``, with optimizer steps that take time."""
    return Cluster(machine=accelerator(model.itemsize))


def ddp_step(model: Model, ranks: int, cluster: Cluster) -> Step:
    """One step of DDP with torch's default buckets."""
    networks: dict[str, Network] = {"gradients": cluster.network(placed(ranks))}
    return steady_step(lambda steps: ddp_record(model, steps), cluster.machine, networks)


def zero1_step(
    model: Model,
    ranks: int,
    cap_bytes: int,
    cluster: Cluster,
    shard_ranks: int | None = None,
    latencies: float | None = None,
) -> Step:
    """One step of zero1_custom.

    Args:
        model: The tensors.
        ranks: Of the training.
        cap_bytes: The most that a bucket of several tensors holds.
        cluster: What it runs on.
        shard_ranks: How many share a bucket, where groups of so many replicate each other's shards; by default all.
        latencies: None for buckets that are filled up to the cap; else they are planned anew from when gradients are
            ready, as before the third step, and this is how often the wire's latency counts for each.
    """
    shard_ranks = shard_ranks or ranks
    within = cluster.network(placed(shard_ranks))
    data: Network = within
    if shard_ranks < ranks or cluster.sums_wider:
        across = cluster.network(holders(ranks, shard_ranks))
        data = ShardGroups(within=within, across=across, sums_wider=cluster.sums_wider)
    flags = Gloo(ranks=ranks, small_messages="doubling" if cluster.flags == "doubling" else "ring")
    networks: dict[str, Network] = {"gradients": data, "parameters": data, "control": flags}
    replan = None
    if latencies is not None:
        replan = Replan(with_latencies(wire_of(within), latencies), cluster.machine.seconds_per_byte["backward"])
    layouts = sharded_plan(model, shard_ranks, cap_bytes, replan)
    return steady_step(
        lambda steps: zero1_record(
            model, layouts, steps, replicas=shard_ranks < ranks, control=cluster.flags != "none"
        ),
        cluster.machine,
        networks,
    )


def holders(ranks: int, shard_ranks: int) -> Placement:
    """The ranks that hold the same shard: of groups of nodes one a node, of groups within nodes several."""
    return Placement(ranks // shard_ranks, placed(ranks).nodes // placed(shard_ranks).nodes)


class Best(NamedTuple):
    """The choice with the shortest step."""

    step: Step
    cap_bytes: int
    shard_ranks: int


def best_cap(model: Model, ranks: int, cluster: Cluster, caps: Sequence[int] = CAPS) -> Best:
    """The lower bound over caps: no cap gives a shorter step."""
    return min(Best(zero1_step(model, ranks, cap, cluster), cap, ranks) for cap in caps)


def best_groups(model: Model, ranks: int, cluster: Cluster, caps: Sequence[int] = CAPS) -> Best:
    """The best of all caps and all groups of 8 ranks, 16, 32, ..., up to all."""
    sizes = [8 * 2**power for power in range(int(math.log2(max(ranks // 8, 1))) + 1)] if ranks > 8 else [ranks]
    return min(
        Best(zero1_step(model, ranks, cap, cluster, shard_ranks), cap, shard_ranks)
        for cap in caps
        for shard_ranks in sizes
    )


def exponent(seconds: Sequence[float], ranks: Sequence[int]) -> float:
    """The p of a time that grows with N^p, by the first and the last."""
    return math.log(seconds[-1] / seconds[0]) / math.log(ranks[-1] / ranks[0])


class Row(NamedTuple):
    """Steps of a model on so many GPUs; ``flags`` are steps with the default cap and flags sent by Gloo."""

    ranks: int
    ddp: Step
    small_cap: Step
    recommended_cap_bytes: int
    recommended: Step
    best: Best
    node_groups: Step | None
    groups: Best
    flags_by_ring: Step
    flags_by_doubling: Step


def row(model: Model, ranks: int, cluster: Cluster) -> Row:
    """Everything that is compared; some 70 replays."""
    cap = default_bucket_cap(model.nbytes, wire_of(cluster.network(placed(ranks))))

    def with_flags(flags: Literal["ring", "doubling"]) -> Step:
        sending = Cluster(machine=cluster.machine, nic_gbs=cluster.nic_gbs, host_cpu=cluster.host_cpu, flags=flags)
        return zero1_step(model, ranks, cap, sending)

    return Row(
        ranks,
        ddp_step(model, ranks, cluster),
        zero1_step(model, ranks, 8 * MIB, cluster),
        cap,
        zero1_step(model, ranks, cap, cluster),
        best_cap(model, ranks, cluster),
        zero1_step(model, ranks, 8 * MIB, cluster, 8) if ranks > 8 else None,
        best_groups(model, ranks, cluster),
        with_flags("ring"),
        with_flags("doubling"),
    )


HEADER = (
    "| N | DDP step / exposed | ZeRO-1 8 MiB | recommended cap: MiB, step / exposed | best cap: MiB, exposed"
    " | groups of 8, 8 MiB | best groups: size, MiB, exposed | flags by ring / doubling, exposed |"
)


def markdown(model: Model, rows: Sequence[Row]) -> Iterator[str]:
    """The table, in milliseconds."""
    yield f"{model.name}, {sum(model.numels) / 1e6:,.0f}M parameters, ms a step:\n"
    yield HEADER
    yield "|---" * 8 + "|"
    for one in rows:
        node = f"{_ms(one.node_groups)}" if one.node_groups else "-"
        yield (
            f"| {one.ranks} | {_ms(one.ddp)} | {_ms(one.small_cap)}"
            f" | {one.recommended_cap_bytes // MIB}, {_ms(one.recommended)}"
            f" | {one.best.cap_bytes // MIB}, {1e3 * one.best.step.exposed_seconds:.2f} | {node}"
            f" | {one.groups.shard_ranks}, {one.groups.cap_bytes // MIB}, {1e3 * one.groups.step.exposed_seconds:.2f}"
            f" | {1e3 * one.flags_by_ring.exposed_seconds:.2f} / {1e3 * one.flags_by_doubling.exposed_seconds:.2f} |"
        )
    ends = [one for one in rows if one.ranks in (64, 1024)]
    if len(ends) == 2:
        yield "\nExponents in N of the step's time from 64 to 1,024: " + ", ".join(
            f"{name} {exponent([step.seconds for step in steps], (64, 1024)):.2f}"
            for name, steps in {
                "DDP": [one.ddp for one in ends],
                "8 MiB": [one.small_cap for one in ends],
                "recommended cap": [one.recommended for one in ends],
                "best cap": [one.best.step for one in ends],
                "best groups": [one.groups.step for one in ends],
            }.items()
        )


def _ms(step: Step) -> str:
    return f"{1e3 * step.seconds:.1f} / {1e3 * step.exposed_seconds:.2f}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Seconds and bytes."""
    return [
        {
            "ranks": one.ranks,
            "recommended_cap_bytes": one.recommended_cap_bytes,
            "best_cap_bytes": one.best.cap_bytes,
            "best_groups": {"shard_ranks": one.groups.shard_ranks, "cap_bytes": one.groups.cap_bytes},
            "steps": {
                name: {"seconds": step.seconds, "exposed_seconds": step.exposed_seconds}
                for name, step in curves(one).items()
            },
        }
        for one in rows
    ]


def curves(one: Row) -> dict[str, Step]:
    """What is drawn, and written down."""
    steps = {
        "DDP, 25 MiB": one.ddp,
        "ZeRO-1, 8 MiB": one.small_cap,
        "ZeRO-1, recommended cap": one.recommended,
        "ZeRO-1, best cap": one.best.step,
        "ZeRO-1, best groups": one.groups.step,
        "flags by Gloo's ring": one.flags_by_ring,
        "flags by doubling": one.flags_by_doubling,
    }
    return steps | ({"ZeRO-1, groups of 8, 8 MiB": one.node_groups} if one.node_groups else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the numbers, as JSON")
    parser.add_argument("--picture", type=Path, help="where to draw exposed milliseconds against ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    tables = {
        model: [row(model, ranks, cluster_for(model)) for ranks in options.ranks]
        for model in (gpt2_medium(), llama_7b())
    }
    for model, rows in tables.items():
        print(*markdown(model, rows), "", sep="\n")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        found = {model.name: as_json(rows) for model, rows in tables.items()}
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.picture:
        # Only here: the tables need no matplotlib.
        from benchmarks.scale.picture import picture

        drawn = {model.name: {one.ranks: curves(one) for one in rows} for model, rows in tables.items()}
        picture(drawn, options.picture)


if __name__ == "__main__":
    main()
