"""What a step exposes in shard groups on hundreds of GPUs, by recorded launches, beside DDP and the best there is.

    python -m benchmarks.scale.group_study [--output results.json]

Each training is played by one rank (``fake_ranks.py``) with the default cap of its groups, and a settled step of its
record is played through (``simulator.py``). The bound is the least that steps made from a list of tensors come to,
over all caps and groups (``study.py``).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scale.fake_ranks import count, silence
from benchmarks.scale.models import Shapes, gpt_350m
from benchmarks.scale.models import llama_7b as llama_shapes
from benchmarks.scale.networks import Network, ShardGroups, placed
from benchmarks.scale.replay_record import DATA_GROUPS, networks_of
from benchmarks.scale.simulator import replay_phase
from benchmarks.scale.study import CAPS, Cluster, best_groups, cluster_for, holders
from benchmarks.scale.synthetic import MIB, Model, gpt2_medium, llama_7b
from benchmarks.scale.training import Training
from lightning_parstrat.core.cost_model import assumed_wire
from lightning_parstrat.core.grouping import default_bucket_cap

RANKS = (64, 256, 512, 1024)
SIZES = (32, 64)
DDP_MIB = 25


class Evidence(NamedTuple):
    """One training.

    Attributes:
        ranks: GPUs.
        shard_group: How many share a copy.
        cap_bytes: The default for them.
        exposed: Seconds of a recorded step that nothing hides.
        ddp: The same of DDP, recorded too.
        bound: The least over all caps and groups.
        state_bytes: What each rank holds of optimizer state and master weights.
    """

    ranks: int
    shard_group: int
    cap_bytes: int
    exposed: float
    ddp: float
    bound: float
    state_bytes: float


def recorded(shapes: Shapes, ranks: int, cap_bytes: int, cluster: Cluster, shard_group: int | None = None) -> float:
    """Exposed seconds of a settled step of zero1_custom, or without a group of DDP, as a played rank records it."""
    arguments = {} if shard_group is None else {"shard_group": shard_group}
    strategy = "ddp" if shard_group is None else "zero1_custom"
    training = Training(strategy, shapes, cap_bytes / MIB, arguments=arguments)
    events = count(training, ranks, plane="nccl", counts_calls=False).events
    networks = networks_of("nccl", ranks)
    if shard_group is not None:
        within, across = cluster.network(placed(shard_group)), cluster.network(holders(ranks, shard_group))
        data: Network = ShardGroups(within=within, across=across)
        networks |= dict.fromkeys(DATA_GROUPS, data)
    return replay_phase(events, "step", cluster.machine, networks)[0].exposed_seconds


def evidence(model: Model, shapes: Shapes, ranks: int, sizes: Sequence[int] = SIZES) -> Iterator[Evidence]:
    """Plays the training once with each size of groups, once with one group of all, and once under DDP."""
    cluster = cluster_for(model)
    ddp = recorded(shapes, ranks, DDP_MIB * MIB, cluster)
    # Gradients in 16 bits are summed in fp32, by master weights.
    bound = best_groups(model, ranks, replace(cluster, sums_wider=model.itemsize == 2), CAPS[:7]).step.exposed_seconds
    # Adam's two numbers in fp32, and the master weights of parameters in 16 bits.
    state_bytes = sum(model.numels) * (8 if model.itemsize == 4 else 12)
    caps = {
        size: default_bucket_cap(model.nbytes, assumed_wire(size, "cuda", ranks // size)) for size in (*sizes, ranks)
    }
    exposed = {size: recorded(shapes, ranks, cap, cluster, size) for size, cap in caps.items()}
    bound = min(bound, *exposed.values())
    for size, cap in caps.items():
        yield Evidence(ranks, size, cap, exposed[size], ddp, bound, state_bytes / size)


def markdown(found: Sequence[Evidence]) -> Iterator[str]:
    """The table."""
    yield "| N | shard_group | cap, MiB | exposed, ms | DDP | bound | to DDP | to bound | state a rank, MB |"
    yield "|---" * 9 + "|"
    for one in found:
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (one.exposed, one.ddp, one.bound))
        ratios = f"{one.exposed / one.ddp:.2f} | {one.exposed / one.bound:.2f}"
        yield (
            f"| {one.ranks} | {one.shard_group} | {one.cap_bytes // MIB} | {times} | {ratios}"
            f" | {one.state_bytes / 1e6:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the numbers, as JSON")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    silence()
    written: dict[str, Any] = {}
    for model, shapes in ((gpt2_medium(), gpt_350m()), (llama_7b(), llama_shapes())):
        found = [one for ranks in options.ranks for one in evidence(model, shapes, ranks)]
        print(f"{model.name}:\n", *markdown(found), "", sep="\n", flush=True)
        written[model.name] = [one._asdict() for one in found]
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
