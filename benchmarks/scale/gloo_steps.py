"""What a step between CPUs should take, from a few measured numbers: to be held against measured steps.

python -m benchmarks.scale.gloo_steps --hop-us 40 --gbs 1.25 --forward-ms 1 --backward-ms 2 --update-ms 0.5
"""

import argparse
from collections.abc import Sequence
from typing import Literal, NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.networks import Gloo, Network
from benchmarks.scale.simulator import Machine, Step, steady_step
from benchmarks.scale.synthetic import MIB, Model, ddp_record, sharded_plan, zero1_record
from lightning_parstrat.core.cost_model import AlphaBeta

RANKS = (2, 4, 8, 16)


class ComputeTimes(NamedTuple):
    """Measured seconds of one process without any communication, for the whole model; the update is that of DDP."""

    forward: float
    backward: float
    update: float


class Prediction(NamedTuple):
    """Steps of DDP, and of zero1_custom with its flags summed up by Gloo's ring and by recursive doubling."""

    ranks: int
    ddp: Step
    zero1_ring: Step
    zero1_doubling: Step


def small_decoder(width: int = 64, depth: int = 2) -> Model:
    """The decoder of ``benchmarks/gpt.py``: by default 1.16 million parameters in 29 tensors."""
    vocabulary, length = 8192, 128
    layer = (3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width, 4 * width * width, width)
    norms = (width,) * 4
    embeddings = (vocabulary * width, length * width)
    return Model("decoder", (*embeddings, *(layer + norms) * depth, width, width, vocabulary * width), itemsize=4)


def predict(
    model: Model,
    ranks: int,
    message: AlphaBeta,
    compute: ComputeTimes,
    *,
    cap_bytes: int = 8 * MIB,
    message_seconds: float | None = None,
    launch_seconds: float = 0.0,
) -> Prediction:
    """The steps of ranks that compute on CPUs and send by Gloo, one rank a host.

    Ranks that share a host also share its cores and memory, which is not modelled: their computation has to be measured
    with all of them at work.

    Args:
        model: The tensors.
        ranks: How many.
        message: What a message from one rank to another takes: the hop, and what each byte adds.
        compute: What was measured of one process.
        cap_bytes: Of the buckets of zero1_custom.
        message_seconds: What each further message of an exchange costs its host; by default a hop.
        launch_seconds: What Python needs for each collective.
    """
    machine = Machine(
        seconds_per_byte={
            "forward": compute.forward / model.nbytes,
            "backward": compute.backward / model.nbytes,
            "update": compute.update / model.nbytes,
        },
        host_computes=True,
        launch_seconds=launch_seconds,
    )

    def gloo(small_messages: Literal["ring", "doubling"]) -> Gloo:
        return Gloo(
            ranks=ranks,
            hop_seconds=message.latency_seconds,
            bytes_per_second=1 / message.seconds_per_byte,
            message_seconds=message_seconds,
            small_messages=small_messages,
        )

    def zero1(small_messages: Literal["ring", "doubling"]) -> Step:
        network: Network = gloo(small_messages)
        networks = dict.fromkeys(("gradients", "parameters", "control"), network)
        layouts = sharded_plan(model, ranks, cap_bytes)
        return steady_step(lambda steps: zero1_record(model, layouts, steps), machine, networks)

    ddp = steady_step(lambda steps: ddp_record(model, steps), machine, {"gradients": gloo("ring")})
    return Prediction(ranks, ddp, zero1("ring"), zero1("doubling"))


def markdown(predictions: Sequence[Prediction]) -> list[str]:
    """The table, in milliseconds."""
    lines = ["| N | DDP | exposed | ZeRO-1 | exposed | with flags by doubling | exposed |", "|---" * 7 + "|"]
    for one in predictions:
        cells = " | ".join(f"{1e3 * step.seconds:.2f} | {1e3 * step.exposed_seconds:.2f}" for step in one[1:])
        lines.append(f"| {one.ranks} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hop-us", type=float, default=constants.GLOO_HOP_US, help="of an empty message")
    parser.add_argument("--gbs", type=float, default=constants.GLOO_GBS, help="of large messages, in GB/s")
    for kind in ComputeTimes._fields:
        parser.add_argument(f"--{kind}-ms", type=float, required=True, help="of the whole model, in one process")
    parser.add_argument("--launch-us", type=float, default=0.0, help="what Python needs for a collective")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()
    message = AlphaBeta(
        latency_seconds=options.hop_us * constants.MICROSECOND,
        seconds_per_byte=1 / (options.gbs * constants.GIGABYTE),
    )
    compute = ComputeTimes(*(getattr(options, f"{kind}_ms") / 1e3 for kind in ComputeTimes._fields))
    launch = options.launch_us * constants.MICROSECOND
    model = small_decoder(options.width, options.depth)
    print(f"{model.name}, {sum(model.numels) / 1e6:.2f}M parameters, ms a step:\n")
    print(*markdown([predict(model, n, message, compute, launch_seconds=launch) for n in options.ranks]), sep="\n")


if __name__ == "__main__":
    main()
