"""What a step between CPUs should take, from a few measured numbers, and how that compares with measured steps.

    python -m benchmarks.scale.gloo_steps --hop-us 40 --gbs 1.25 --forward-ms 1 --backward-ms 2 --update-ms 0.5
    python -m benchmarks.scale.gloo_steps --measure --output benchmarks/results/scale_gloo_steps.json

``--measure`` trains real ranks, forked on this machine, whose layers sleep and whose messages go by a wire of a known
latency and rate (``paced_wire.py``), slow enough that it, not the machine's cores, is what is measured. What the cores
take all the same is a constant, measured before (``constants.py``), times the ranks that share a core.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

from torch.distributed import distributed_c10d

from benchmarks.scale import constants
from benchmarks.scale.fake_ranks import silence
from benchmarks.scale.models import small
from benchmarks.scale.networks import Gloo, Network
from benchmarks.scale.paced_wire import paced
from benchmarks.scale.real_ranks import allow_many_files, run
from benchmarks.scale.recorder import Recorder
from benchmarks.scale.simulator import Machine, Step, steady_step
from benchmarks.scale.synthetic import DDP_CAPS, MIB, Model, ddp_record, sharded_plan, zero1_record
from benchmarks.scale.training import StrategyName, Training
from lightning_parstrat.core.cost_model import AlphaBeta

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import write_result

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
    ddp_caps: Sequence[int] = DDP_CAPS,
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
        ddp_caps: Of the first bucket of DDP, and the others.
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

    ddp = steady_step(lambda steps: ddp_record(model, steps, ddp_caps), machine, {"gradients": gloo("ring")})
    return Prediction(ranks, ddp, zero1("ring"), zero1("doubling"))


def markdown(predictions: Sequence[Prediction]) -> list[str]:
    """The table, in milliseconds."""
    lines = ["| N | DDP | exposed | ZeRO-1 | exposed | with flags by doubling | exposed |", "|---" * 7 + "|"]
    for one in predictions:
        cells = " | ".join(f"{1e3 * step.seconds:.2f} | {1e3 * step.exposed_seconds:.2f}" for step in one[1:])
        lines.append(f"| {one.ranks} | {cells} |")
    return lines


class Emulated(NamedTuple):
    """Steps that are measured: what computes, and what carries.

    Attributes:
        forward_ms: Of each of 60 tensors, all of which sleep; a backward takes twice as long.
        hop_ms: Of the wire.
        bytes_per_second: Of each rank's interface.
        cap_mb: Of buckets in MiB.
        steps: That are measured, after those in which buckets are planned.
        cores: Of this machine, which the ranks share.
    """

    forward_ms: float = 3.0
    hop_ms: float = 5.0
    bytes_per_second: float = 1e6
    cap_mb: float = 0.25
    steps: int = 2
    cores: int = 2


def expected(emulated: Emulated, ranks: int) -> dict[str, float]:
    """Seconds of a step, by strategy."""
    shapes = small()
    model = Model(shapes.name, shapes.elements, shapes.dtype.itemsize)
    forward = len(shapes.elements) * emulated.forward_ms / 1e3
    cap = round(emulated.cap_mb * MIB)
    sharing = max(1.0, ranks / emulated.cores)
    # Whatever a rank waits for has been sent and received by processors, too.
    message_seconds = sharing * constants.GLOO_MESSAGE_US * constants.MICROSECOND
    launches = 2 * len(sharded_plan(model, ranks, cap)) + 1
    found = predict(
        model,
        ranks,
        AlphaBeta(
            latency_seconds=emulated.hop_ms / 1e3 + message_seconds, seconds_per_byte=1 / emulated.bytes_per_second
        ),
        ComputeTimes(forward, 2 * forward, 0.0),
        cap_bytes=cap,
        ddp_caps=(cap // 25, cap),
        message_seconds=message_seconds,
        launch_seconds=sharing * constants.GLOO_HOST_MS / 1e3 / launches,
    )
    return {"zero1_custom": found.zero1_doubling.seconds, "ddp": found.ddp.seconds}


def measured(emulated: Emulated, strategy: StrategyName, ranks: int) -> float:
    """Seconds of a settled step of real ranks: of the slowest one."""
    shapes = small()
    wire = paced(distributed_c10d.ProcessGroupGloo, emulated.hop_ms / 1e3, 1 / emulated.bytes_per_second)
    training = Training(strategy, shapes, emulated.cap_mb, emulated.steps, ranks_per_node=1)
    seconds_per_byte = emulated.forward_ms / 1e3 / (shapes.elements[0] * shapes.dtype.itemsize)
    with (
        mock.patch.object(distributed_c10d, "ProcessGroupGloo", wire),
        mock.patch.object(Recorder, "compute", _sleeping(Recorder.compute, seconds_per_byte)),
    ):
        return max(one.step_seconds for one in run(training, ranks))


def _sleeping(compute: Callable[..., None], seconds_per_byte: float) -> Callable[..., None]:
    def computed(self: Recorder, kind: str, nbytes: int) -> None:
        time.sleep({"forward": 1, "backward": 2}[kind] * seconds_per_byte * nbytes)
        compute(self, kind, nbytes)

    return computed


def compare(emulated: Emulated, sizes: Sequence[int]) -> dict[str, Any]:
    """Measured and expected steps in seconds, and by how much the latter are off, by strategy and ranks."""
    found: dict[str, Any] = {"zero1_custom": {}, "ddp": {}}
    for ranks in sizes:
        for strategy, seconds in expected(emulated, ranks).items():
            took = measured(emulated, strategy, ranks)  # type: ignore[arg-type]
            cell = {"measured": round(took, 4), "expected": round(seconds, 4), "off": round(seconds / took - 1, 3)}
            found[strategy][ranks] = cell
            print(f"{strategy}, {ranks} ranks: {cell}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hop-us", type=float, default=constants.GLOO_HOP_US, help="of an empty message")
    parser.add_argument("--gbs", type=float, default=constants.GLOO_GBS, help="of large messages, in GB/s")
    for kind in ComputeTimes._fields:
        parser.add_argument(f"--{kind}-ms", type=float, help="of the whole model, in one process")
    parser.add_argument("--launch-us", type=float, default=0.0, help="what Python needs for a collective")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="measure steps over a slow wire, and compare")
    parser.add_argument("--output", type=Path, help="where to write what was measured")
    options = parser.parse_args()
    if options.measure:
        silence()
        allow_many_files()
        emulated = Emulated()
        write_result({"emulated": emulated._asdict(), "steps": compare(emulated, options.ranks)}, options.output)
        return
    if None in (options.forward_ms, options.backward_ms, options.update_ms):
        parser.error("--forward-ms, --backward-ms and --update-ms are needed where nothing is measured")
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
