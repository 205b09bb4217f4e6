"""``lightning-parstrat plan``: estimates what a training needs under each strategy, without a device."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.planned_module import PlannedModule, read_module
from lightning_parstrat.cli.text import amount, table
from lightning_parstrat.core.cost_model import assumed_wire
from lightning_parstrat.core.estimate import Cluster, Estimate, estimate_ddp, estimate_zero1, estimate_zero3
from lightning_parstrat.core.layout import ParameterSpec
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroupChoice, ShardGroups, advised_size
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.core.wording import counted

_DESCRIPTION = """
Creates the module of a LightningCLI configuration without memory for its parameters (on the meta device). Shows what
each rank holds and sends, and whether it fits, under ddp, ddp_tuned, zero1_custom and zero3_custom, in fp32 and in
16 bits; then recommends one: of those that fit, the one that shards least. With --accumulate, zero2_custom is among
them, which shards the gradients that are held between micro-batches. zero3_custom is torch's FSDP2, with the units that
it finds, or that the configuration's ZeRO3Strategy names. Activations are not counted: leave room for them (--reserve).

  lightning-parstrat plan --config c.yaml --world-size 16 --devices-per-node 8 --memory 80GB --bandwidth 100Gbit
"""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--config", type=str, required=True, metavar="FILE", help="LightningCLI configuration of the module")
    add("--model", type=str | None, metavar="CLASS", help="the module's class, where the file does not give it")
    add("--world-size", type=PositiveInt, required=True, help="number of ranks")
    add("--devices-per-node", type=PositiveInt | None, help="ranks of a node (default: all, on one node)")
    add("--memory", type=str | None, help="memory of a device, such as 80GB or 24GiB; shows what fits")
    add("--bandwidth", type=str | None, help="of a node's link, such as 100Gbit; shows how long sending takes")
    add("--calibration", type=str | None, metavar="FILE", help="output of `doctor --json`, instead of --bandwidth")
    add("--compute-seconds", type=PositiveFloat | None, help="time of one process's step alone, to predict step times")
    add("--shard-group", type=ShardGroupChoice, default="all", help="as in ZeRO1Strategy: all, node, or a number")
    add("--bucket-cap-mb", type=PositiveFloat | None, help="as in ZeRO1Strategy (default: by ranks and model)")
    add("--accumulate", type=PositiveInt, default=1, help="micro-batches of a step (accumulate_grad_batches)")
    add("--reserve", type=float, default=0.2, help="part of the memory left for activations")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace, program: list[str]) -> int:
    """Prints the estimates; the exit code is 1 where none fits.

    Raises:
        UsageError: The configuration does not name a module, or an argument cannot be read.
    """
    if program:
        raise UsageError("plan runs no program: leave out what follows `--`, and give its configuration by --config.")
    if not 0 <= arguments.reserve < 1:
        raise UsageError(f"--reserve {arguments.reserve:g}: write a part of the memory, such as 0.2: 0 <= reserve < 1.")
    cluster = _cluster(arguments)
    memory = None if arguments.memory is None else _bytes(arguments.memory, "--memory")
    module = read_module(Path(arguments.config), arguments.model)
    groups = _shard_groups(arguments.shard_group, cluster)
    policy = ShardingPolicy(bucket_cap_mb=arguments.bucket_cap_mb or "auto")
    model_bytes = sum(one.numel * one.itemsize for one in module.parameters)
    # Memory is planned for GPUs as a rule, and hardly depends on it.
    cap_bytes = policy.bucket_cap_bytes(model_bytes, assumed_wire(groups.size, "cuda", groups.copies), "cuda")
    estimates = _estimates(module, cluster, cap_bytes, groups.size, arguments.accumulate)
    room = None if memory is None else memory * (1 - arguments.reserve)
    choice, why = recommend(estimates, room, cluster, arguments.compute_seconds)
    if choice is not None:
        why += _more_of(choice, module, groups, arguments.compute_seconds)
    left_out = _left_out(memory, arguments.reserve)
    if arguments.json:
        print(json.dumps({**_as_json(estimates, room, choice, why, arguments.compute_seconds), "left_out": left_out}))
    else:
        _print(estimates, module, cluster, room, arguments)
        print(f"\n{why}\n{left_out}")
    return 1 if choice is None else 0


_FROM_LEAST_SHARDING = (
    ("ddp_tuned", "32-true"),
    ("zero1_custom", "32-true"),
    ("zero2_custom", "32-true"),
    ("zero1_custom", "bf16-true"),
    ("zero2_custom", "bf16-true"),
    ("zero3_custom", "32-true"),
    ("zero3_custom", "bf16-mixed"),
)
"""What is recommended, in this order. Lightning's `ddp` is not: for the same results it holds more than `ddp_tuned`."""


def recommend(
    estimates: Sequence[Estimate], room: float | None, cluster: Cluster, compute_seconds: float | None
) -> tuple[Estimate | None, str]:
    """Recommends a strategy: of those that fit, the one that shards least, unless another one is faster.

    Where it is not known what fits, that is ``zero1_custom`` rather than ``ddp_tuned``: it leaves more room.

    Args:
        estimates: Of any of the strategies.
        room: Bytes that a rank may hold; None where that is not known.
        cluster: Where the training runs.
        compute_seconds: See :meth:`Estimate.step_seconds`.

    Returns:
        The recommended estimate and why; None and what to do instead where none fits.
    """
    by_name = {(one.strategy, one.precision): one for one in estimates}
    known = [by_name[name] for name in _FROM_LEAST_SHARDING if name in by_name]
    fitting = [one for one in known if room is None or one.peak_bytes <= room]
    if not fitting:
        least = min(known, key=lambda one: one.peak_bytes)
        return None, (
            f"It fits under no strategy: even {least.strategy} in {least.precision} holds {amount(least.peak_bytes)} at"
            f" most, {amount(least.held_bytes)} of it between steps. Take more ranks where most of it is held"
            " between steps; else smaller units (`wrap` of zero3_custom), and tensor or pipeline parallelism"
            " (Lightning's ModelParallelStrategy) where a single layer is too large."
        )
    if cluster.world_size == 1:
        return fitting[0], "Recommended: no strategy. There is one rank: nothing to shard, nothing to send."
    ddp, zero1 = by_name["ddp_tuned", "32-true"], by_name["zero1_custom", "32-true"]
    if ddp in fitting and zero1 in fitting:
        return _ddp_or_zero1(ddp, zero1, room is not None, compute_seconds)
    return fitting[0], _why_not_less(fitting, zero1)


def _ddp_or_zero1(ddp: Estimate, zero1: Estimate, fits: bool, compute_seconds: float | None) -> tuple[Estimate, str]:
    saved = 1 - zero1.held_bytes / ddp.held_bytes
    times = _times(compute_seconds, ddp, zero1)
    known = "Both fit" if fits else "No --memory was given, so it is not known what fits"
    # Closer than 2 % the model does not predict.
    if times is not None and times[1] > 1.02 * times[0]:
        return ddp, f"Recommended: strategy=ddp_tuned. {known}. It is faster by {1 - times[0] / times[1]:.0%}."
    if fits and (times is None or times[0] <= 1.02 * times[1]):
        return ddp, (
            f"Recommended: strategy=ddp_tuned. {known}, and it shards nothing; zero1_custom would hold"
            f" {saved:.0%} less, with the same results."
        )
    faster = "" if times is None or times[0] <= times[1] else f" and a step {1 - times[1] / times[0]:.0%} less time"
    return zero1, (
        f"Recommended: strategy=zero1_custom. {known}. It holds {saved:.0%} less than DDP{faster}, with the same"
        " results. Where it matters, measure both: only one word differs."
    )


def _why_not_less(fitting: Sequence[Estimate], zero1: Estimate) -> str:
    """Why the first of ``fitting`` is recommended, where ``ddp_tuned`` and ``zero1_custom`` do not both fit."""
    choice = fitting[0]
    sends = f"{choice.sent_bytes / max(zero1.sent_bytes, 1):.1f} times as much per step as zero1_custom"
    in_fp32 = next((one.strategy for one in fitting if one.precision == "32-true"), None)
    also = f" In fp32 it would fit under {in_fp32} alone." if in_fp32 else ""
    reasons = {
        ("ddp_tuned", "32-true"): "It fits, and zero1_custom does not.",
        ("zero1_custom", "32-true"): "DDP does not fit; the results are the same.",
        ("zero2_custom", "32-true"): (
            f"Only with gradients sharded between micro-batches it fits; it sends {sends}, with the same results."
        ),
        ("zero1_custom", "bf16-true"): (
            "In fp32 it fits under neither; in bf16 the sharded fp32 master weights keep updates that bf16 would lose."
            f"{also}"
        ),
        ("zero2_custom", "bf16-true"): (
            "Only with gradients sharded between micro-batches it fits; the sharded fp32 master weights keep updates"
            f" that bf16 would lose.{also}"
        ),
        ("zero3_custom", "32-true"): (
            f"Only with parameters sharded, too, it fits; it sends {sends}, with the same results. It is torch's FSDP2:"
            " between steps parameters are DTensors, and some things are refused (docs/limits.md)."
        ),
        ("zero3_custom", "bf16-mixed"): (
            'Only with parameters sharded and gathered in 16 bits (gather_dtype="bf16") it fits; each rank steps its'
            " part in fp32. It is torch's FSDP2: some things are refused (docs/limits.md)."
        ),
    }
    precision = "" if choice.precision == "32-true" else f" with precision={choice.precision}"
    return f"Recommended: strategy={choice.strategy}{precision}. {reasons[choice.strategy, choice.precision]}"


def _more_of(choice: Estimate, module: PlannedModule, groups: ShardGroups, compute_seconds: float | None) -> str:
    """What else there is to know of the recommended strategy."""
    more = ""
    times = _times(compute_seconds, choice)
    if times is not None:
        more += f" A step is predicted to take {times[0]:.3g} s."
    if choice.strategy == "zero3_custom" and not module.cut_anywhere:
        more += (
            " Muon and Adafactor step whole parameters there, on every rank. Another optimizer is tried on small"
            " sharded parameters first, and refused where it looks at whole matrices."
        )
    return more + (advice_on_groups(groups) if choice.strategy.startswith(("zero1", "zero2")) else "")


def _left_out(memory: float | None, reserve: float) -> str:
    if memory is None:
        return (
            "Left out: activations, which depend on the batch and are the same under every strategy, and what"
            " optimizers and kernels need for a moment."
        )
    return (
        f"Left out: activations, which depend on the batch; {amount(reserve * memory)} of {amount(memory)} are kept for"
        f" them, and for what optimizers and kernels need for a moment (--reserve {reserve:g})."
    )


def advice_on_groups(groups: ShardGroups) -> str:
    """What to say of shard groups where zero1_custom is recommended; empty where one group of all is as good."""
    size = advised_size(groups.world_size)
    if size is None or groups.size <= size:
        return ""
    return (
        f" On {groups.world_size} GPUs a ring of {groups.size} ranks takes longer than computation hides, by a model of"
        f" NCCL: shard_group={size} would not, and each rank would hold 1/{size} of the optimizer state (add"
        f" --shard-group {size} to see it)."
    )


def _shard_groups(choice: ShardGroupChoice, cluster: Cluster) -> ShardGroups:
    try:
        ShardingPolicy(shard_group=choice)
        nodes = tuple(rank // cluster.devices for rank in range(cluster.world_size))
        return ShardGroups.chosen(choice, Topology(nodes))
    except ValueError as error:
        raise UsageError(f"--shard-group: {error}") from error


def _times(compute_seconds: float | None, *estimates: Estimate) -> list[float] | None:
    if compute_seconds is None:
        return None
    times = [one.step_seconds(compute_seconds) for one in estimates]
    return None if None in times else times  # type: ignore[return-value]


def _estimates(
    module: PlannedModule, cluster: Cluster, bucket_cap_bytes: int, shard_ranks: int, micro_batches: int
) -> list[Estimate]:
    narrow = [_in_bf16(one) for one in module.parameters]
    states = 4 * module.states
    of_zero = partial(
        estimate_zero1,
        state_per_element=states,
        cluster=cluster,
        bucket_cap_bytes=bucket_cap_bytes,
        partition="element" if module.cut_anywhere else "parameter",
        shard_ranks=shard_ranks,
        micro_batches=micro_batches,
    )
    of_ddp = partial(estimate_ddp, module.parameters, states, cluster, "32-true", micro_batches)
    estimates = [of_ddp(gradients_in_buckets=False), of_ddp()]
    for shard_gradients in (False, True) if micro_batches > 1 else (False,):
        estimates += [
            of_zero(module.parameters, precision="32-true", shard_gradients=shard_gradients),
            of_zero(narrow, precision="bf16-true", has_master_weights=True, shard_gradients=shard_gradients),
        ]
    fixed = module.frozen + module.buffers
    estimates = [_with_fixed(one, (2 if one.precision == "bf16-true" else 4) * fixed) for one in estimates]
    sharded = module.fully_sharded(cluster.world_size)
    # What it cannot shard, every rank holds: with gradients and state, or as it is.
    trained, others = module.whole
    fixed_bytes = round((8 + states) * trained) + 4 * (others + module.buffers)
    for precision, itemsize in (("32-true", 4), ("bf16-mixed", 2)):
        of_zero3 = estimate_zero3(
            sharded, states, cluster, precision, gathered_itemsize=itemsize, micro_batches=micro_batches
        )
        estimates.append(_with_fixed(of_zero3, fixed_bytes))
    return estimates


def _with_fixed(one: Estimate, nbytes: int) -> Estimate:
    """With what the strategy does not shard."""
    return one._replace(
        held_bytes=one.held_bytes + nbytes,
        peak_bytes=one.peak_bytes + nbytes,
        accumulating_bytes=one.accumulating_bytes + nbytes,
    )


def _in_bf16(spec: ParameterSpec) -> ParameterSpec:
    return ParameterSpec(name=spec.name, shape=spec.shape, dtype="torch.bfloat16", itemsize=2, group="torch.bfloat16")


def _cluster(arguments: Namespace) -> Cluster:
    devices = arguments.devices_per_node or arguments.world_size
    if arguments.world_size % devices:
        raise UsageError(
            f"--world-size {arguments.world_size} is not a multiple of --devices-per-node {devices}: all nodes must"
            " have equally many ranks."
        )
    if arguments.bandwidth is not None and arguments.calibration is not None:
        raise UsageError("--bandwidth and --calibration both give the speed of the link: use one of them.")
    rate = None
    if arguments.bandwidth is not None:
        rate = _bytes_per_second(arguments.bandwidth)
    elif arguments.calibration is not None:
        rate = _calibrated(Path(arguments.calibration))
    return Cluster(nodes=arguments.world_size // devices, devices=devices, bytes_per_second=rate)


def _bytes_per_second(text: str) -> float:
    """100Gbit, 100Gbit/s and 100G are bits; 12GB/s is bytes."""
    match = re.fullmatch(r"(.*?[\dKMGTi])\s*(bit|bits|bps|b|B)?(/s)?", text.strip())
    rate = _bytes(match[1] if match else text, "--bandwidth") / (1 if match and match[2] == "B" else 8)
    if rate <= 0:
        raise UsageError(f"--bandwidth {text!r}: must be more than 0.")
    return rate


def _calibrated(path: Path) -> float:
    try:
        return 1.0 / json.loads(path.read_text())["all_reduce"]["seconds_per_byte"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"--calibration {path}: this is not the output of a `lightning-parstrat doctor --json` that could measure"
            f" ({error!r})."
        ) from error


def _bytes(text: str, option: str) -> float:
    match = re.fullmatch(r"\s*([\d.]+)\s*(?=[BKMGT])([KMGT]?I?)B?(?:/s)?\s*", text.upper().replace("/S", "/s"))
    try:
        return float(match[1]) * _UNITS[match[2]]  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        raise UsageError(f"{option} {text!r}: write a number and a unit, such as 80GB, 24GiB or 100Gbit.") from None


def _as_json(
    estimates: Sequence[Estimate], room: float | None, choice: Estimate | None, why: str, seconds: float | None
) -> dict[str, Any]:
    rows = [
        {
            **one._asdict(),
            "fits": None if room is None else one.peak_bytes <= room,
            "step_seconds": None if seconds is None else one.step_seconds(seconds),
        }
        for one in estimates
    ]
    recommended = None if choice is None else {"strategy": choice.strategy, "precision": choice.precision}
    return {"estimates": rows, "recommended": recommended, "why": why}


def _print(
    estimates: Sequence[Estimate], module: PlannedModule, cluster: Cluster, room: float | None, arguments: Namespace
) -> None:
    count = sum(one.numel for one in module.parameters)
    fixed = module.frozen + module.buffers
    frozen = f" and {fixed / 1e6:,.1f} M elements that are not trained" if fixed else ""
    print(f"{count / 1e6:,.1f} M trainable parameters{frozen}; optimizer: {module.optimizer}")
    ranks, nodes = counted(cluster.world_size, "rank"), counted(cluster.nodes, "node")
    size = _shard_groups(arguments.shard_group, cluster).size
    grouped = f", in shard groups of {size}" if size < cluster.world_size else ""
    print(f"{ranks} on {nodes}{grouped}; per rank, without activations:\n")
    header = ["strategy", "precision", "between steps", "at most", "sent per step"]
    rows = [
        [one.strategy, one.precision, amount(one.held_bytes), amount(one.peak_bytes), amount(one.sent_bytes)]
        for one in estimates
    ]
    if arguments.accumulate > 1:
        header.insert(3, "between micro-batches")
        for row, one in zip(rows, estimates, strict=True):
            row.insert(3, amount(one.accumulating_bytes))
    if cluster.bytes_per_second is not None:
        header.append("on the wire")
        for row, one in zip(rows, estimates, strict=True):
            row.append(f"{one.wire_seconds:.3f} s")
        if arguments.compute_seconds is not None:
            header.append("step")
            for row, one in zip(rows, estimates, strict=True):
                row.append(f"{one.step_seconds(arguments.compute_seconds):.3f} s")
    if room is not None:
        header.append(f"fits in {amount(room)}")
        for row, one in zip(rows, estimates, strict=True):
            row.append("yes" if one.peak_bytes <= room else "no")
    print(table([header, *rows]))
