"""One process plays one rank of up to 1,024 through a training, and counts what that costs.

    python -m benchmarks.scale.fake_ranks --sizes 64 1024 --planes nccl --save sharded
    python -m benchmarks.scale.fake_ranks --sizes 8 --strategy ddp --model 350m --cap-mb 25 --events ddp.jsonl

The Trainer, the strategy and everything below are the real ones; process groups are those of ``played_group.py``, which
send nothing. Prints the counters of every phase as JSON and, of more than one size, how they grow.

Waits of what NCCL carries are those of a GPU's stream; the host waits for the control group, which is always Gloo's.

What it does not show: whether a wire is slower than what is to be hidden behind it (a simulator replays the events for
that); what threads launch is written down where the caller has launched, as if messages came at once; nothing completes
before somebody waits, so memory is what it would be on a slow wire.
"""

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.scale.events import Event, Phase, write_events
from benchmarks.scale.models import gpt_350m, llama_7b, small
from benchmarks.scale.playing import Plane
from benchmarks.scale.recorder import Counters, Recorder
from benchmarks.scale.training import Save, StrategyName, Training, play
from benchmarks.scale.wires import GLOO, NCCL
from lightning_parstrat.core.layout import Partition

MODELS = {"small": small, "350m": gpt_350m, "7b": llama_7b}

GLOO_GROUPS: dict[Plane, tuple[str, ...]] = {
    "gloo": ("world", "gradients", "parameters", "control", "checkpoint"),
    "nccl": ("control", "checkpoint"),
}

ON_DEVICE = frozenset({"gradients", "parameters"})
"""What NCCL carries."""


class Sockets(NamedTuple):
    """Connections of a rank for one group of Gloo's.

    Attributes:
        full_mesh: As Gloo makes them, when the group is made.
        used: Those that anything was sent by, which is what lazy connections come to.
    """

    full_mesh: int
    used: int


class Played(NamedTuple):
    """What a played rank has cost."""

    size: int
    rank: int
    counters: Mapping[Phase, Counters]
    sockets: Mapping[str, Sockets]
    events: Sequence[Event]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the events."""
        return {
            "size": self.size,
            "rank": self.rank,
            "counters": {phase: counters.as_dict() for phase, counters in self.counters.items()},
            "sockets": {group: sockets._asdict() for group, sockets in self.sockets.items()},
        }


def count(training: Training, size: int, rank: int = 0, plane: Plane = "gloo", counts_calls: bool = True) -> Played:
    """Plays a rank, in this process, which must be in no process group.

    Args:
        training: What is trained.
        size: The number of ranks.
        rank: Which one is played; a load is played by rank 0 alone.
        plane: What carries gradients and parameters.
        counts_calls: Whether calls of Python functions are counted, which takes several times as long.
    """
    on_nccl = plane == "nccl"
    recorder = Recorder(NCCL if on_nccl else GLOO, on_device=ON_DEVICE if on_nccl else frozenset())
    with recorder.counting_calls() if counts_calls else nullcontext():
        play(training, recorder, rank, size, plane)
    groups = [name for name in GLOO_GROUPS[plane] if name in recorder.groups]
    sockets = {name: Sockets(size - 1, len(recorder.peers[name])) for name in groups}
    return Played(size, rank, dict(recorder.counters), sockets, recorder.events)


def exponents(fewer: Played, more: Played) -> dict[Phase, dict[str, float]]:
    """The power of the number of ranks by which each counter grows from one size to another; 0 where it does not.

    Counters that are 0 at either size are left out, unless they are at one: then it is infinite, with its sign.
    """
    ratio = math.log(more.size / fewer.size)
    found: dict[Phase, dict[str, float]] = {}
    for phase in fewer.counters.keys() & more.counters.keys():
        first, last = fewer.counters[phase].numbers(), more.counters[phase].numbers()
        names = dict.fromkeys((*first, *last))
        pairs = {name: (first.get(name, 0), last.get(name, 0)) for name in names}
        found[phase] = {
            name: math.log(b / a) / ratio if a and b else math.copysign(math.inf, b - a)
            for name, (a, b) in pairs.items()
            if a or b
        }
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024], help="numbers of ranks")
    parser.add_argument("--strategy", choices=get_args(StrategyName), default="zero1_custom")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0], help="which are played, where there are as many")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--planes", choices=get_args(Plane), nargs="+", default=["gloo"])
    parser.add_argument("--cap-mb", type=float, default=0.25, help="size of a bucket in MiB")
    parser.add_argument("--shard-group", type=int, help="how many ranks share a copy; by default all")
    parser.add_argument("--steps", type=int, default=1, help="settled steps to record")
    parser.add_argument("--save", choices=get_args(Save))
    parser.add_argument("--partition", choices=get_args(Partition), help="of zero1_custom")
    parser.add_argument("--no-calls", action="store_true", help="do not count calls of Python functions: faster")
    parser.add_argument("--events", type=Path, help="where to write the record of the last one")
    parser.add_argument("--output", type=Path, help="where to write the counters; by default they are printed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plays ranks of all sizes one after the other, on each plane."""
    asked = _parse(arguments)
    silence()
    shapes = MODELS[asked.model]()
    arguments: dict[str, Any] = {} if asked.partition is None else {"partition": asked.partition}
    if asked.shard_group is not None:
        arguments["shard_group"] = asked.shard_group
    training = Training(asked.strategy, shapes, asked.cap_mb, asked.steps, asked.save, asked.ranks_per_node, arguments)
    found: dict[str, Any] = {"asked": vars(asked)}
    for plane in asked.planes:
        which = [(size, rank) for rank in asked.ranks for size in asked.sizes if rank < size]
        played = [count(training, size, rank, plane, not asked.no_calls) for size, rank in which]
        of_first = [one for one in played if one.rank == asked.ranks[0]]
        growth = exponents(of_first[0], of_first[-1]) if len(of_first) > 1 else {}
        found[plane] = {"played": [one.as_dict() for one in played], "exponents": growth}
        if asked.events is not None:
            write_events(played[-1].events, asked.events)
        for phase, of_counters in growth.items():
            for name, exponent in of_counters.items():
                print(f"{plane} {phase:13} {name:32} N^{exponent:.2f}", file=sys.stderr)
    result = json.dumps(found, default=str)
    if asked.output is None:
        print(result)
    else:
        asked.output.write_text(result)


def silence() -> None:
    """Keeps Lightning's lines about each of many Trainers out of the result."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    main()
