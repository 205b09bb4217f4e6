"""Plays recorded steps through, and prints their milliseconds.

python -m benchmarks.scale.replay_record events.jsonl --ranks 64 --plane nccl --itemsize 4
python -m benchmarks.scale.replay_record events.jsonl --ranks 8 --plane gloo --seconds-per-mib 1e-3 2e-3 5e-4
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.scale import constants
from benchmarks.scale.events import read_events
from benchmarks.scale.networks import Gloo, Nccl, Network, placed
from benchmarks.scale.simulator import Machine, Step, accelerator, replay_phase

DATA_GROUPS = ("gradients", "parameters", "world")
HOST_GROUPS = ("control", "checkpoint")


def networks_of(plane: Literal["nccl", "gloo"], ranks: int, gloo: Gloo | None = None) -> dict[str, Network]:
    """What carries each group of a recorded training.

    Args:
        plane: What gradients and parameters travel by; control messages and checkpoints go by Gloo.
        ranks: Of the training.
        gloo: How fast Gloo is; by default as in ``constants.py``.
    """
    between_hosts = gloo or Gloo(ranks=ranks)
    data: Network = between_hosts if plane == "gloo" else Nccl(placement=placed(ranks), host_cpu="Intel")
    return {**dict.fromkeys(DATA_GROUPS, data), **dict.fromkeys(HOST_GROUPS, between_hosts)}


def main(arguments: Sequence[str] | None = None) -> Step:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--plane", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--phase", default="step")
    parser.add_argument("--small-messages", choices=("ring", "doubling"), default="ring")
    parser.add_argument("--itemsize", type=int, default=4, help="bytes of an element, on GPUs")
    parser.add_argument(
        "--seconds-per-mib", type=float, nargs=3, metavar=("FORWARD", "BACKWARD", "UPDATE"), help="of CPUs, for gloo"
    )
    options = parser.parse_args(arguments)
    if (options.plane == "gloo") != (options.seconds_per_mib is not None):
        parser.error("--seconds-per-mib belongs to --plane gloo, which needs it")
    machine = accelerator(options.itemsize)
    if options.seconds_per_mib is not None:
        forward, backward, update = (seconds / constants.MIB for seconds in options.seconds_per_mib)
        rates = {"forward": forward, "backward": backward, "update": update}
        machine = Machine(seconds_per_byte=rates, host_computes=True)
    gloo = Gloo(ranks=options.ranks, small_messages=options.small_messages)
    networks = networks_of(options.plane, options.ranks, gloo)
    step, events = replay_phase(read_events(options.events), options.phase, machine, networks)
    print(f"{len(events)} events, {step.launches} launches: {1e3 * step.seconds:.3f} ms,", end=" ")
    print(f"of which {1e3 * step.exposed_seconds:.3f} ms are exposed")
    return step


if __name__ == "__main__":
    main()
